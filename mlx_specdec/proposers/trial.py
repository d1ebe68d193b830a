"""Whether a drafter can be right at all: what becomes of the first tokens that it drafts."""

from __future__ import annotations

DRAFTED = 64
"""Tokens of a trial."""
JUDGED = 16
"""Of these at least, the target has to have looked at; it looks no further than the first one that
is wrong, so that long proposals are worth no more than short ones."""
LEAST_ACCEPTED = 0.1
"""Share of the tokens that were looked at. Drafters that gain anything have several times that."""
CAUSES = "was probably made for another target, or for the model that this one was fine-tuned from"


class Trial:
    """One drafter on one target, over all texts. It is over when enough was drafted."""

    def __init__(self) -> None:
        self._drafted = self._judged = self._accepted = 0
        self._told = False

    @property
    def over(self) -> bool:
        """Whether nothing more counts."""
        return self._drafted >= DRAFTED and self._judged >= JUDGED

    def count(self, drafted: int, accepted: int) -> None:
        """What became of one proposal, in tokens."""
        if not self.over:
            self._drafted += drafted
            self._judged += min(drafted, accepted + 1)
            self._accepted += accepted

    def caution(self, name: str, more_causes: str = "") -> str:
        """What to say of a drafter of this name that failed, once; else nothing."""
        failed = self.over and self._accepted < LEAST_ACCEPTED * self._judged
        if self._told or not failed:
            return ""
        self._told = True
        return (
            f"hardly any draft tokens are accepted ({self._accepted} of {self._drafted}): {name} "
            f"{CAUSES}{more_causes}"
        )
