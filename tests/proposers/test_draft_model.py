"""A draft model as a proposer: what it prefills, and what rows of a group have in common."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.core.proposer import Proposer
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.proposers.draft_model import BACKLOG_CHUNK, CATCH_UP, DraftModel
from mlx_specdec.proposers.medusa import Medusa
from mlx_specdec.types import Proposal, Scores

from ..support import tiny
from ..support.pairs import SIZE
from ..support.rows import row_of

SILENT = SilentNoise()


class Watched(DecoderOnlyModel):
    """A draft model that notes the shapes of its passes. longest: Its maximum length."""

    def __init__(self, longest: int | None = None) -> None:
        super().__init__(tiny.build("llama"), longest)
        self.passes: list[tuple[int, int]] = []

    def run(self, tokens: mx.array, *rest: Any) -> Scores:
        self.passes.append(tokens.shape)  # type: ignore[arg-type]
        return super().run(tokens, *rest)


def fresh(prompt: list[int], number: int = 0) -> Any:
    return row_of(prompt, SIZE, number=number)


def see(proposer: Proposer, rows: list[Any], *seen: list[int]) -> None:
    """Let the target process these committed tokens of each row."""
    for row, tokens in zip(rows, seen, strict=True):
        row.seen, row.processed = tokens, row.processed + len(tokens)
    proposer.observe(rows, Scores(mx.zeros((len(rows), max(map(len, seen)), SIZE))))


def write(row: Any, tokens: list[int]) -> None:
    row.committed, row.position = [*row.committed, *tokens], row.position + len(tokens)


def a_round(
    proposer: Proposer, rows: list[Any], made: Proposal | None = None, *accepted: int
) -> None:
    """Accept this many draft tokens of each row, and let the target choose another token."""
    for place, row in enumerate(rows):
        kept = [] if made is None else made.of(place).tokens.tolist()[0][: accepted[place]]
        write(row, [*kept, len(row.committed) % 50 + 3])
    see(proposer, rows, *(row.committed[row.processed : -1] for row in rows))


def lengths(row: Any) -> tuple[int, ...]:
    return row.state["draft"].place.context.lengths


def test_a_prompt_that_the_draft_has_no_positions_for_makes_it_abstain() -> None:
    proposer, row = DraftModel(Watched(4)), fresh([2, 3, 4, 5, 6])
    see(proposer, [row], row.prompt[:-1])
    assert not proposer.ready([row], [8])
    assert proposer.propose([row], [8], SILENT).size == 0
    assert proposer.snapshot(row) == {}


def test_the_prompt_is_read_along_with_the_target_and_rejected_tokens_are_taken_back() -> None:
    proposer, row = DraftModel(Watched()), fresh([2, 3, 4, 5, 6])
    for piece in (row.prompt[:2], row.prompt[2:4]):
        see(proposer, [row], piece)
    assert lengths(row) == (4,)
    made = proposer.propose([row], [3], SILENT)
    assert lengths(row) == (7,)
    a_round(proposer, [row], made, 1)
    assert lengths(row) == (6,)
    # Tokens of plain steps are not fed before the next draft.
    a_round(proposer, [row])
    assert lengths(row) == (6,)
    proposer.propose([row], [1], SILENT)
    assert lengths(row) == (8,)


def test_a_draft_that_is_not_wanted_at_once_prefills_with_its_first_proposal() -> None:
    model, row = Watched(), fresh([2] * (2 * BACKLOG_CHUNK + 10))
    proposer = DraftModel(model, eager=lambda: False)
    for start in range(0, len(row.prompt) - 1, 100):
        see(proposer, [row], row.prompt[:-1][start : start + 100])
    for _ in range(6):
        assert proposer.ready([row], [4])
        a_round(proposer, [row])
    assert model.passes == []
    proposer.propose([row], [2], SILENT)
    # A long backlog is prefilled in chunks, and its last token gives the first draft token.
    assert model.passes[-5:] == [(1, BACKLOG_CHUNK), (1, BACKLOG_CHUNK), (1, 15), (1, 1), (1, 1)]


# Rows of a group, which draft what they draft alone.


WARM = [Options(temperature=1.0), Options(), Options(temperature=0.7, top_k=5)]


def alone(row: Any, limit: int) -> Proposal:
    """Return what a row drafts whose proposer has seen nothing of it."""
    twin = fresh(row.committed)
    twin.drafted_from, twin.options = row.drafted_from, row.options
    return DraftModel(Watched()).propose([twin], [limit], SILENT)


def drafts_as_alone(
    proposer: DraftModel, rows: list[Any], limits: list[int], counts: list[int] | None = None
) -> Proposal:
    """Propose, and check that each row drafts what it drafts alone. counts: How many draft tokens
    the rows have, by default their limits."""
    counts, made = counts or limits, proposer.propose(rows, limits, SILENT)
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if count:
            mine, expected = made.of(place), alone(row, count)
            assert mine.tokens.tolist() == expected.tokens.tolist()
            if expected.rows is not None:
                assert mx.allclose(mx.exp(mine.rows), mx.exp(expected.rows), atol=1e-5)
    assert [made.count(place) for place in range(len(rows))] == counts
    return made


@pytest.mark.parametrize("backlog", [CATCH_UP - 1, CATCH_UP + 1, 40])
def test_rows_that_join_late_draft_as_alone(backlog: int) -> None:
    rows = [row_of([5 + n, 9, 12 + n][: 3 - n], SIZE, WARM[n], number=n) for n in range(3)]
    proposer = DraftModel(Watched(), eager=lambda: False)
    first = rows[:2]
    see(proposer, first, *(row.prompt[:-1] for row in first))
    a_round(proposer, first, drafts_as_alone(proposer, first, [3, 1]), 2, 0)
    # The third row joins without a context in the draft, and has written tokens by itself.
    late = rows[2]
    write(late, [3 + n % 50 for n in range(backlog)])
    late.processed = len(late.committed) - 1
    # Plain rounds come first, so that all of them have tokens which the draft has not seen.
    a_round(proposer, rows)
    a_round(proposer, rows, drafts_as_alone(proposer, rows, [2, 3, 0]), 1, 3, 0)
    # The first row leaves, and the others change places.
    left = [rows[2], rows[1]]
    a_round(proposer, left, drafts_as_alone(proposer, left, [3, 2]), 0, 1)
    assert lengths(left[0]) == tuple(len(row.committed) - 1 for row in left)


def test_no_row_drafts_while_one_is_longer_than_the_draft_can_take() -> None:
    proposer = DraftModel(Watched(12))
    rows = [fresh([5, 9, 12, 7, 33, 21, 8, 4, 3], 0), fresh([6, 2], 1)]
    see(proposer, rows, *(row.prompt[:-1] for row in rows))
    # The first row has three positions left.
    a_round(proposer, rows, drafts_as_alone(proposer, rows, [8, 8], [3, 3]), 1, 0)
    a_round(proposer, rows, drafts_as_alone(proposer, rows, [8, 8], [1, 1]), 0, 0)
    assert not proposer.ready(rows, [2, 2])
    a_round(proposer, rows, drafts_as_alone(proposer, rows, [2, 2], [0, 0]), 0, 0)
    assert proposer.snapshot(rows[1])["draft"].length <= rows[1].processed
    # The first row leaves, and the other one goes on.
    a_round(proposer, rows[1:], drafts_as_alone(proposer, rows[1:], [2], [2]), 1)
    too_long = [fresh([7] * 12, 2)]
    see(proposer, too_long, too_long[0].prompt[:-1])
    assert not proposer.ready(too_long, [2]) and proposer.snapshot(too_long[0]) == {}


# Medusa as a proposer: which hidden state it reads, and what its tokens are drawn from.


COUNT, WIDTH = 3, 8


class Echo:
    """Head i thinks that the token is the state's number plus i."""

    count = COUNT

    def logits(self, state: mx.array, count: int) -> mx.array:
        best = (state.astype(mx.int32) + mx.arange(count)) % WIDTH
        return 3.0 * (mx.arange(WIDTH) == best[..., None])[:, 0].astype(mx.float32)


def shown(medusa: Medusa, rows: list[Any], *numbers: list[int]) -> None:
    """Show the rows as many hidden states as they have numbers."""
    longest = max(map(len, numbers))
    states = mx.array([[[n] for n in row + [0] * (longest - len(row))] for row in numbers])
    for row, seen in zip(rows, numbers, strict=True):
        row.seen = seen
    medusa.observe(rows, Scores(mx.zeros((len(rows), longest, WIDTH)), {"final": states}))


def begun(**settings) -> tuple[Medusa, Any]:
    medusa, row = Medusa(Echo()), row_of([1, 2], WIDTH, Options(**settings))
    shown(medusa, [row], [7, 2])
    return medusa, row


def test_each_head_proposes_one_token_from_the_last_state_of_the_prompt() -> None:
    medusa, row = begun()
    drafts = {
        limit: medusa.propose([row], [limit], SILENT).tokens.tolist()[0] for limit in (2, 3, 9)
    }
    assert drafts == {2: [2, 3], 3: [2, 3, 4], 9: [2, 3, 4]}, "there are no more heads"


def test_after_a_round_each_row_reads_the_state_that_predicted_its_newest_token() -> None:
    medusa, rows = Medusa(Echo()), [row_of([1, 2], WIDTH) for _ in range(3)]
    for accepted in range(COUNT + 1):
        shown(medusa, rows, [*range(accepted + 1)], [5], [])
        proposal = medusa.propose(rows, [3, 1, 2], SILENT)
        assert proposal.counts == (3, 1, 0), "the last row has no hidden state"
        assert proposal.tokens[:2, 0].tolist() == [accepted, 5]
        assert medusa.propose(rows[2:], [3], SILENT).size == 0
