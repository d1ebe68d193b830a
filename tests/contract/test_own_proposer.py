"""A proposer of the caller's own: what it may return, and what is said about anything else."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import DecodingError, Options, Proposal, Proposer, load, stream_generate

from .support import checkpoint

PROMPT = "def read_lines(path):"
OPTIONS = Options(max_tokens=8, num_draft=3, cost_cache=False, temperature=0.7)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(checkpoint(tmp_path_factory.mktemp("own")))


class Returns(Proposer):
    """A proposer that returns what `make` makes of its limit."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def propose(self, committed: Any, limit: int, noise: Any) -> Any:
        return self._make(limit)


def rows(width: int) -> mx.array:
    return mx.zeros((1, 2, width))


WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "nothing": (lambda limit: None, "an object of the type NoneType: return a Proposal"),
    "list": (lambda limit: [5, 9], "an object of the type list: return a Proposal"),
    "array": (lambda limit: mx.array([[5, 9]]), "an object of the type array: return a Proposal"),
    "list of tokens": (
        lambda limit: Proposal([[5, 9]]),  # type: ignore[arg-type]
        r"tokens of the type list: return integers of the shape \(1, n\)",
    ),
    "flat tokens": (
        lambda limit: Proposal(mx.array([5, 9])),
        r"tokens of the shape \(2,\) and the type mlx.core.int32: return integers of the shape",
    ),
    "two sequences": (
        lambda limit: Proposal.one_hot([[5], [9]]),
        r"tokens of the shape \(2, 1\) .*: return integers of the shape \(1, n\)",
    ),
    "fractions": (
        lambda limit: Proposal(mx.array([[5.0, 9.0]])),
        r"tokens of the shape \(1, 2\) and the type mlx.core.float32: return integers",
    ),
    "too many": (
        lambda limit: Proposal.one_hot([[5] * (limit + 1)]),
        r"\d tokens where the limit is \d: return at most that many",
    ),
    "narrow rows": (
        lambda limit: Proposal(mx.array([[5, 9][:limit]]), rows(7)),
        r"rows of the shape \(1, 2, 7\) .*: return None or log q of the shape \(1, 2, 3\d\d\)",
    ),
    "unknown token": (
        lambda limit: Proposal.one_hot([[5000]]),
        "a token that the target does not have: propose ids from 0 to 3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_proposal_is_named_in_one_sentence(pair: Any, name: str) -> None:
    make, sentence = WRONG[name]
    run = stream_generate(pair, PROMPT, OPTIONS, proposer=Returns(make))
    with pytest.raises(
        DecodingError, match=f"^Returns(.propose returned| proposed) {sentence}"
    ) as e:
        run.result()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda limit: Proposal.one_hot([[]]),
        lambda limit: Proposal.one_hot([[5, 9, 11][:limit]]),
        lambda limit: Proposal(mx.array([[5, 9]], dtype=mx.int64)[:, :limit]),
        lambda limit: Proposal(mx.array([[5, 9]], dtype=mx.uint32)[:, :limit]),
    ],
)
def test_any_right_proposal_leaves_the_completion_as_it_is(pair: Any, make: Any) -> None:
    plain = stream_generate(pair, PROMPT, OPTIONS, proposer=None).result()
    result = stream_generate(pair, PROMPT, OPTIONS, proposer=Returns(make)).result()
    assert result.tokens == plain.tokens


def test_rows_that_a_proposer_drew_from_are_taken(pair: Any) -> None:
    def uniform(limit: int) -> Proposal:
        count = min(limit, 2)
        return Proposal(mx.array([[5, 9]])[:, :count], mx.zeros((1, count, pair.vocabulary)))

    options = Options(max_tokens=8, num_draft=3, temperature=1.0, rule="token", cost_cache=False)
    result = stream_generate(pair, PROMPT, options, proposer=Returns(uniform)).result()
    assert len(result.tokens) > 0 and result.stats.drafted > 0
