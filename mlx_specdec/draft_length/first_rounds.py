"""Which rounds a process has run before. It reads no clock and knows nothing of costs."""


class FirstRounds:
    """The kinds of rounds that a process has run for one pair.

    Metal compiles each kernel at its first use, and each number of rows needs other kernels. So the
    seconds of the first round of a kind do not tell what the next ones cost.
    """

    def __init__(self) -> None:
        self._kinds: set[tuple[str, int, int]] = set()

    def add(self, source: str, drafted: int, rows: int) -> bool:
        """Add a round, and return whether it is the first of its kind.

        Args:
            source: Name of the costs of who drafts; "" in plain decoding.
            drafted: Draft length, 0 in plain decoding.
            rows: Sequences of the batch.
        """
        kind = (source, drafted, rows)
        first = kind not in self._kinds
        self._kinds.add(kind)
        return first
