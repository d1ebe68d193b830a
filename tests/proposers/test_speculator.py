"""A drafter on hidden states as a proposer: what it reads when, and what its tokens are drawn from.

The network here writes down what happens to it.
"""

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.core import rules
from mlx_specdec.core.distribution import Distribution, choose
from mlx_specdec.core.noise import CoupledNoise, IndependentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.core.proposer import Prices
from mlx_specdec.models.drafters.network import MOST_IN_PASS
from mlx_specdec.proposers.hidden_state import EAGER_FROM
from mlx_specdec.proposers.hidden_state import worth as worth_of
from mlx_specdec.types import Proposal

from ..support.nothing import NO_DRAFT
from ..support.scribe import SIZE, Drawn, Notes, Scribe, begun


def test_every_state_is_read_once_with_the_token_after_it() -> None:
    shown, text = begun(), [1, 2, 3]
    shown.see(text[:-1])
    assert shown.notes.rows == [], "the hidden states wait for the next draft"
    # Uneven rounds, plain steps among them; each time the target has processed all but the newest.
    for count in (1, 4, 1, 1, 3):
        assert shown.drafted(text, 3) == [(text[-1] + n) % SIZE for n in (1, 2, 3)]
        assert shown.notes.rows == list(itertools.pairwise(text))
        new = [(7 * len(text) + n) % SIZE for n in range(count)]
        shown.see([text[-1], *new[:-1]])
        text = text + new
    assert shown.drafted(text, 1) == [(text[-1] + 1) % SIZE]
    assert shown.notes.passes == [2, 1, 4, 1, 1, 3]


def test_many_states_are_read_as_they_come_but_for_the_newest() -> None:
    shown, step = begun(), EAGER_FROM + 1
    text = [n % SIZE for n in range(3 * EAGER_FROM)]
    shown.see(text[:step])
    assert shown.notes.passes == [EAGER_FROM]
    shown.see(text[step : step + 5])
    assert shown.notes.passes == [EAGER_FROM]
    shown.see(text[step + 5 : 2 * step])
    assert shown.notes.passes == [EAGER_FROM, step]
    assert shown.drafted(text[: 2 * step + 1], 1)
    assert shown.notes.rows == list(itertools.pairwise(text[: 2 * step + 1]))


@pytest.mark.parametrize("eager", [True, False])
def test_states_that_are_read_late_are_computed_late(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, computed = begun(eager=eager), []
    monkeypatch.setattr(mx, "eval", lambda *arrays: computed.extend(arrays))
    shown.see([n % SIZE for n in range(EAGER_FROM + 1)])
    assert bool(computed) is eager


def test_states_of_rows_that_have_left_are_released() -> None:
    """Rows come and go while no draft is worth its time."""
    network = Scribe()
    context, before = network.open(2), mx.get_active_memory()
    for _ in range(60):
        for _ in range(5):
            states = mx.ones((2, 1, 100_000))
            mx.eval(states)
            context.add(states, (1, 1))
        context.keep([1])
        joining = network.open(1)
        joining.add(mx.zeros((1, 1, 100_000)), (1,))
        context.merge(joining)
        network.opened.clear()
    assert max(context.waiting) == 6
    mx.synchronize()
    assert mx.get_active_memory() - before < 100_000_000


def test_states_that_wait_for_the_first_draft_are_read_in_passes_of_limited_size() -> None:
    shown = begun(eager=False)
    text = [n % SIZE for n in range(2 * MOST_IN_PASS + 6)]
    for start in range(0, len(text) - 1, 400):
        shown.see(text[start : min(start + 400, len(text) - 1)])
    assert shown.notes.passes == []
    assert shown.drafted(text, 1)
    assert shown.notes.passes == [MOST_IN_PASS, MOST_IN_PASS, 5]
    assert shown.notes.rows == list(itertools.pairwise(text))


@pytest.mark.parametrize("source", [CoupledNoise(3, SIZE), IndependentNoise(3, SIZE)])
def test_tokens_are_drawn_from_the_rows_with_the_rounds_noise(source) -> None:
    settings = {"temperature": 0.7, "top_k": 5, "presence_penalty": 1.2}
    shown, noise = begun(**settings), source.at(0, 4)
    shown.row.drafted_from = law = Distribution(Options(**settings), SIZE, prefix_length=3)
    shown.see([1, 2])
    proposal = shown.propose([1, 2, 3], 4, noise)
    [tokens] = proposal.tokens.tolist()
    newest, text = 3, [1, 2, 3]
    for index, token in enumerate(tokens):
        row = law.log_probabilities(shown.notes._likes(newest), text, NO_DRAFT)
        assert mx.array_equal(proposal.rows[:, index : index + 1], row)
        assert choose(row, noise.draft(index)).item() == token
        newest = token
        text.append(token)


# A draft ends before the first token that is not worth its verification.


STEEP = Prices([1.0, 1.5, 2.0, 2.5, 3.0, 3.5], 1.0)
"""A further token has to stay with a chance of one half."""


def worth(*rows: Sequence[float]) -> int:
    """The draft length for rows with these chances, of different lengths."""
    counts = list(map(len, rows))
    chances = mx.array([[*row, *[0.9] * (max(counts) - len(row))] for row in rows])
    return worth_of(chances, counts, STEEP)


def test_a_draft_ends_before_the_first_token_that_is_not_worth_it() -> None:
    assert worth((0.9, 0.9, 0.9, 0.9)) == 4
    assert worth((0.9, 0.8, 0.6, 0.9)) == 2, "together they stay with a chance of 0.43"
    assert worth((0.9, 0.1, 0.9)) == 1
    assert worth((0.1, 0.9, 0.9)) == 1, "the first one is paid for"


def test_the_rows_of_a_batch_have_one_draft_length_that_is_right_on_average() -> None:
    sure, unsure = (0.9, 0.9, 0.9, 0.9), (0.4, 0.4, 0.4, 0.4)
    assert worth(sure, sure) == 4 and worth(unsure, sure) == 1
    assert worth(sure, sure, unsure) == 3, "the means are 0.59, 0.51 and 0.45"
    # A row that may draft only one token gains nothing from longer drafts.
    assert worth(sure, sure, (0.9,)) == 2
    assert worth(sure, ()) == 1


class SureNotes(Notes):
    guessed: list[mx.array]

    def _begin(self, *arguments):
        self.guessed = [mx.array([[0.9]])]
        return super()._begin(*arguments)

    def next_logits(self, tokens):
        self.guessed.append(mx.where((tokens == 5) | (tokens == 6), 0.1, 0.9))
        return super().next_logits(tokens)

    def chances(self):
        return mx.concatenate(self.guessed, axis=1)


class Sure(Scribe):
    """It says of tokens 5 and 6 that nothing after them stays."""

    def open(self, count=1):
        self.opened.append(SureNotes(self, count))
        return self.opened[-1]


def test_a_proposal_is_cut_with_its_rows() -> None:
    costs: list[Prices | None] = [STEEP]
    shown = begun(Sure(), lambda: costs[0], temperature=1.0)
    shown.see([1, 2])
    assert shown.drafted([1, 2, 3], 5) == [4, 5]
    shown.see([3])
    proposal = shown.propose([1, 2, 3, 3], 5, IndependentNoise(0, SIZE).at(0, 0))
    assert proposal.rows is not None
    assert proposal.rows.shape[1] == proposal.size == proposal.count(0)
    costs[0] = None
    shown.see([3])
    assert shown.drafted([1, 2, 3, 3, 3], 5) == [4, 5, 6, 7, 0]


@pytest.mark.parametrize("rule", [rules.block, rules.token])
def test_what_is_emitted_has_the_targets_law_wherever_drafts_end(rule) -> None:
    """Of two tokens the second is not drafted behind 0; two rounds emit p twice all the same."""
    p, laws = np.array([0.6, 0.3, 0.1]), [[0.3, 0.3, 0.4], [0.1, 0.2, 0.7]]
    samples, generator = 4000, np.random.default_rng(0)
    texts: list[list[int]] = [[] for _ in range(samples)]
    for _ in range(2):
        drawn = np.stack([generator.choice(3, samples, p=law) for law in laws], axis=1)
        ends = drawn[:, 0] == 0
        for size, group in ((1, np.flatnonzero(ends)), (2, np.flatnonzero(~ends))):
            log_p = mx.log(mx.array([p.tolist()] * (size + 1)))
            log_q = mx.log(mx.array(laws[:size]))
            wide = (len(group), size, 3)
            tokens = mx.array(drawn[group, :size].astype(np.int32))
            proposal = Proposal(tokens, mx.broadcast_to(log_q, wide))
            row = mx.broadcast_to(log_p, (len(group), size + 1, 3))
            verdict = rule(row, proposal, Drawn(generator, len(group), 3), 0.0)
            for seed, accepted, following in zip(
                group, verdict.accepted.sum(axis=1).tolist(), verdict.next.tolist(), strict=True
            ):
                texts[seed] += [*drawn[seed, :accepted].tolist(), following]
    counts = np.zeros((3, 3))
    for text in texts:
        counts[text[0], text[1]] += 1
    expected = np.outer(p, p)
    deviation = np.sqrt(expected * (1 - expected) / samples)
    assert (np.abs(counts / samples - expected) < 4.5 * deviation).all()
