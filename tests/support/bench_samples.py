"""Samples with chosen figures."""

from collections.abc import Sequence

from mlx_specdec.core.statistics import Timed, summary
from mlx_specdec.measure.methods import Case, Length, Measurements, Method, Prompts, Sample, Texts
from mlx_specdec.results import Step


def sample(
    seconds: float,
    rounds: Sequence[tuple[int, int]] = ((0, 0),) * 10,
    *,
    tokens: tuple[int, ...] | None = None,
) -> Sample:
    """Return a completion whose rounds drafted and accepted these numbers of tokens."""
    taken = []
    for drafted, accepted in rounds:
        step = Step(tokens=(1,) * (accepted + 1), drafted=drafted, accepted=accepted)
        taken.append((step, Timed(seconds / len(rounds), drafts=drafted > 0)))
    stats = summary(taken, load=0, prompt=0, decoding=seconds)
    made = sum(accepted + 1 for _, accepted in rounds)
    tokens = tuple(range(made)) if tokens is None else tokens
    return Sample(tokens, len(tokens), seconds, len(rounds), "text", stats)


def method(name: str, family: str, num_draft: Length, same_text: bool = True) -> Method:
    """A method that is never run."""

    def run(prompts: Prompts) -> Texts:
        raise NotImplementedError

    return Method(name, family, num_draft, same_text, run)


def measured(
    samples: dict[str, list[Sample]],
    methods: list[Method],
    categories: Sequence[str | None],
) -> Measurements:
    """One repeat; entry i of every list is case i."""
    return Measurements(
        methods=methods,
        cases=[Case(number, 0, category) for number, category in enumerate(categories)],
        samples={
            name: {(case, 0): one for case, one in enumerate(made)}
            for name, made in samples.items()
        },
    )
