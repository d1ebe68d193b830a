"""A draft model as a proposer: how far ahead it may decode."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_specdec.draft_length.auto import LONG_PROMPT, AutoLength, Source
from mlx_specdec.draft_length.saved import Memory
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.interfaces import Scores
from mlx_specdec.options import Options
from mlx_specdec.proposers import hidden_state
from mlx_specdec.proposers.draft_model import CHUNK, DraftModel
from mlx_specdec.proposers.medusa import Medusa
from mlx_specdec.sampling.distribution import Distribution, choose
from mlx_specdec.sampling.noise import CoupledNoise, SilentNoise
from mlx_specdec.sampling.settings import Sampling

from ..support import drafter_pairs
from ..support.lengths import teach
from ..support.mocks import VOCABULARY, TableContext
from ..support.nothing import NO_DRAFT
from ..support.pairs import decoder_only


class Table:
    vocabulary = VOCABULARY

    def __init__(self, max_length: int | None) -> None:
        self.max_length = max_length
        self.opened: list[TableContext] = []

    def prefix(self, prompt) -> list[int]:
        return list(prompt)

    def open_batch(self, prompts, cached) -> TableContext:
        self.opened.append(TableContext())
        return self.opened[-1]


def test_a_prompt_that_the_draft_has_no_positions_for_makes_it_abstain() -> None:
    proposer = DraftModel(Table(4), Sampling(temperature=0), VOCABULARY)
    prompt = [2, 3, 4, 5, 6]
    proposer.begin([prompt])
    proposer.observe([prompt[:-1]], [Scores(mx.zeros((1, 4, VOCABULARY)))])
    assert not proposer.ready([prompt], 8)
    assert proposer.propose([prompt], 8, SilentNoise()).size == 0


def test_the_prompt_is_read_along_with_the_target_and_rejected_tokens_are_taken_back() -> None:
    model = Table(None)
    opened = model.opened
    proposer = DraftModel(model, Sampling(temperature=0), VOCABULARY)
    prompt = [2, 3, 4, 5, 6]
    proposer.begin([prompt])
    for piece in (prompt[:2], prompt[2:4]):
        proposer.observe([piece], [Scores(mx.zeros((1, 2, VOCABULARY)))])
    assert opened[0].lengths == (4,)
    proposer.propose([prompt], 3, SilentNoise())
    assert opened[0].lengths == (7,)
    # The target kept one drafted token, and chose another one after it.
    proposer.observe([[6, 1]], [Scores(mx.zeros((1, 2, VOCABULARY)))])
    assert opened[0].lengths == (6,)
    # Plain steps are not read before the next proposal.
    proposer.observe([[7]], [Scores(mx.zeros((1, 1, VOCABULARY)))])
    assert opened[0].lengths == (6,)
    proposer.propose([[*prompt, 1, 7, 8]], 1, SilentNoise())
    assert opened[0].lengths == (8,)


def test_what_is_not_wanted_at_once_reads_nothing_before_its_first_draft() -> None:
    model = Table(None)
    proposer = DraftModel(model, Sampling(temperature=0), VOCABULARY, eager=False)
    text = [2] * (2 * CHUNK + 10)
    proposer.begin([text])
    for place in range(0, len(text) - 1, 100):
        piece = text[:-1][place : place + 100]
        proposer.observe([piece], [Scores(mx.zeros((1, len(piece), VOCABULARY)))])
    for token in range(3, 9):
        # Plain steps, the next one of which is asked for while one is in flight.
        assert proposer.ready([text], 4)
        text.append(token)
        proposer.observe([text[-2:-1]], [Scores(mx.zeros((1, 1, VOCABULARY)))])
    assert model.opened == []
    proposer.propose([text], 2, SilentNoise())
    [context] = model.opened
    # A long text is read in pieces, of which the last gives the first drafted token.
    assert context.calls == [(CHUNK, 0), (CHUNK, 0), (15, 0), (1, 0), (1, 1)]


# Medusa as a proposer: which hidden row it reads, and what its tokens are drawn from.


SIZE = 8
COUNT = 3
SILENT = SilentNoise()


class Echo:
    """Head i thinks that the token is the state's number plus i."""

    count = COUNT

    def logits(self, state: mx.array, count: int) -> mx.array:
        assert state.shape == (1, 1, 1)
        best = (state[0, 0, 0].astype(mx.int32) + mx.arange(count)) % SIZE
        return 3.0 * (mx.arange(SIZE) == best[:, None])[None].astype(mx.float32)


def states(*numbers: int) -> Scores:
    return Scores(mx.zeros((1, len(numbers), SIZE)), {"final": mx.array([[[n] for n in numbers]])})


def begun(state: int = 2, **settings) -> Medusa:
    medusa = Medusa(Echo(), Sampling(**settings), SIZE)
    medusa.begin([[1, 2]])
    medusa.observe([[1, 2]], [states(7, state)])
    return medusa


def tokens(medusa: Medusa, limit: int = COUNT) -> list[int]:
    return medusa.propose([[1, 2]], limit, SILENT).tokens.tolist()[0]


def test_each_head_proposes_one_token_from_the_last_state_of_the_prompt() -> None:
    assert tokens(begun()) == [2, 3, 4]
    assert tokens(begun(), limit=2) == [2, 3]
    assert tokens(begun(), limit=9) == [2, 3, 4], "there are no more heads"


@pytest.mark.parametrize("accepted", range(COUNT + 1))
def test_after_a_round_the_row_that_predicted_the_newest_token_is_read(accepted: int) -> None:
    medusa = begun()
    medusa.observe([[2] * (accepted + 1)], [states(*range(accepted + 1))])
    assert tokens(medusa, 1) == [accepted]


def test_above_temperature_0_tokens_are_drawn_from_the_rows_with_the_rounds_noise() -> None:
    settings = Sampling(temperature=0.7, top_k=5)
    noise = CoupledNoise(3, SIZE).at(0, 4)
    proposal = begun(temperature=0.7, top_k=5).propose([[1, 2]], COUNT, noise)
    logits = Echo().logits(mx.array([[[2]]]), COUNT)
    log_p = Distribution(settings, SIZE).log_probabilities(logits, [], NO_DRAFT)
    gumbel = mx.concatenate([noise.draft(index) for index in range(COUNT)], axis=1)
    assert mx.array_equal(proposal.rows, log_p)
    assert proposal.tokens.tolist() == choose(log_p, gumbel).tolist()


OPTIONS = Options(max_tokens=30, cost_cache=False)


def worth(name: str) -> AutoLength:
    """Lengths that know a source as one whose drafts pay."""
    source, memory = Source(name, costs=name, text=name), Memory()
    teach(memory, source, lambda drafted: 1 + 0.05 * drafted, 0.9)
    return AutoLength([source], memory)


@pytest.mark.parametrize(("tokens", "late"), [(LONG_PROMPT, False), (LONG_PROMPT + 1, True)])
def test_a_draft_reads_a_long_prompt_after_the_first_token(tokens: int, late: bool) -> None:
    pair = decoder_only("llama")
    prompt = [1 + number % 40 for number in range(tokens)]
    read, real = [], pair.draft.open_batch
    lengths = worth("draft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pair.draft, "open_batch", lambda *prompts: (read.append(1), real(*prompts))[1]
        )
        patch.setattr("mlx_specdec.engine.opening.make_draft_length", lambda *_: lengths)
        run = stream_generate(pair, prompt, OPTIONS)
        run.read_prompt()
        assert bool(read) is not late
        result = run.result()
    assert read and result.stats.drafted > 0
    assert result.tokens == generate(pair, prompt, Options(max_tokens=30, regular=True)).tokens


@pytest.mark.parametrize("waiting", [40, 4096])
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "mtp"])
def test_a_drafter_reads_hidden_states_of_a_long_prompt_when_it_drafts(
    kind: str, waiting: int, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_state, "WAITING", waiting)
    pair = drafter_pairs.made(kind, "llama", tmp_path)
    prompt = [1 + number % 40 for number in range(150)]
    options = replace(OPTIONS, max_tokens=12, temperature=1, seed=3, prefill_step_size=35)
    lengths = worth(pair.drafter_network.kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_specdec.engine.opening.make_draft_length", lambda *_: lengths)
        run = stream_generate(pair, prompt, options)
    late = run.result()
    early = generate(pair, prompt, replace(options, num_draft=4))
    plain = generate(pair, prompt, replace(options, regular=True))
    assert late.tokens == early.tokens == plain.tokens
    assert late.stats.drafted > 0
