"""The loop on mocks: one pass per round, and nothing is seen twice."""

import inspect
import random
import textwrap

import mlx.core as mx
import pytest

from mlx_specdec.decoding.loop import CHUNK, LARGE_CHUNK, Decoding, PromptReader, chunk
from mlx_specdec.decoding.statistics import Recorder
from mlx_specdec.errors import DecodingError
from mlx_specdec.interfaces import Proposal, Rule
from mlx_specdec.sampling.noise import IndependentNoise
from mlx_specdec.sampling.settings import Sampling
from mlx_specdec.verification.rules import block, token

from ..support.mocks import VOCABULARY, Guesser, TableContext, decoding, figures, first_round, run
from ..support.shipped import ROOT

ROOM = 30


def partly_right(text: list[int], seed: int, abstain: float = 0.0) -> Guesser:
    """Guesses the text itself, with errors at random places and sometimes nothing."""
    dice = random.Random(seed)

    def guess(position: int, limit: int) -> list[int]:
        if dice.random() < abstain:
            return []
        right = text[position : position + limit]
        right += [0] * (limit - len(right))
        return [token if dice.random() < 0.7 else (token + 1) % VOCABULARY for token in right]

    return Guesser(guess)


@pytest.mark.parametrize(
    ("held", "prompts", "expected"),
    # A Mac of 16 GiB, of which its GPU may use 10.7.
    [(4.0, 1, LARGE_CHUNK), (4.0, 2, CHUNK), (9.6, 1, CHUNK)],
)
def test_an_accelerator_reads_long_chunks_where_its_own_memory_has_room(
    held: float, prompts: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    info = {"memory_size": 16 << 30, "max_recommended_working_set_size": int(10.7 * (1 << 30))}
    monkeypatch.setattr(mx, "device_info", lambda device=None: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: int(held * (1 << 30)))
    assert chunk(prompts, holds_scores=False) == expected


def test_a_speculative_round_is_one_pass_over_what_is_unseen() -> None:
    context = TableContext(1)
    expected = context.greedy([1], 12)
    guesser = Guesser(lambda position, limit: expected[position : position + limit])
    run(decoding(context, guesser, count=3, room=12))
    assert context.calls == [(4, 3), (4, 3), (4, 3)]


def test_plain_decoding_submits_the_next_step_before_it_reads() -> None:
    context = TableContext(2)
    loop = decoding(context, None, room=6)
    first_round(loop)
    assert len(context.calls) == 2
    run(loop)
    assert context.calls == [(1, 0)] * 6


@pytest.mark.parametrize("prompt", [[1], [1, 4, 2, 7, 3]])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_observe_sees_all_that_stayed_once_and_nothing_that_did_not(
    prompt: list[int], count: int
) -> None:
    context = TableContext(5)
    expected = context.greedy(prompt, 24)
    text = [*prompt, *expected]
    dice = random.Random(5)

    def guess(position: int, limit: int) -> list[int]:
        right = expected[position : position + limit]
        return [] if dice.random() < 0.3 else [t if dice.random() < 0.7 else 0 for t in right]

    guesser = Guesser(guess, prefix=len(prompt), taps=("final",))
    run(decoding(context, guesser, count=count, room=24, prompt=prompt))
    assert guesser.begun == [prompt]
    seen = [token for tokens, _ in guesser.observed for token in tokens]
    # What the last round saw is told to nobody: the text has ended.
    assert seen == text[: len(seen)] and len(text) - len(seen) <= count + 2
    rows = [row for _, scores in guesser.observed for row in scores.logits[0]]
    states = [row for _, scores in guesser.observed for row in scores.hidden["final"][0]]
    assert len(rows) == len(states) == len(seen)
    for place, row in enumerate(rows):
        before = text[place - 1] if place else 0
        assert mx.array_equal(row, context.table[before, text[place]])


@pytest.mark.parametrize("length", [1, 2, 512, 513, 514, 1100])
def test_the_prompt_is_read_in_chunks_all_but_its_last_token(length: int) -> None:
    context, progress = TableContext(), []
    prompt = [1 + place % 5 for place in range(length)]
    reader = PromptReader(
        context, [prompt], [prompt], progress=lambda done, total: progress.append((done, total))
    )
    steps = 0
    while not reader.done:
        reader.step()
        steps += 1
    assert context.lengths == (length - 1,)
    assert steps == max(1, -(-(length - 1) // 512))
    assert all(rows <= 512 and proposed == 0 for rows, proposed in context.calls)
    assert progress[0] == (0, length) and progress[-1] == (length, length)
    assert progress == sorted(progress)


def test_a_proposer_that_abstains_stays_in_the_pipeline_of_plain_decoding() -> None:
    """The pass for the next token is submitted before the last one is read, and none is wasted."""
    passes = {}
    for name, guesser in (("plain", None), ("abstains", Guesser(lambda position, limit: []))):
        context = TableContext(3)
        recorder = Recorder()
        loop = decoding(context, guesser, count=4, room=ROOM, recorder=recorder)
        first = first_round(loop)
        assert context.lengths[0] == 1 + len(first.tokens)
        run(loop)
        stats = figures(recorder)
        passes[name] = stats.target_passes
    assert passes["abstains"] == passes["plain"] == ROOM


@pytest.mark.parametrize("rule", [token, block])
def test_no_key_is_used_twice_in_a_whole_text(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int | str, ...]] = []
    noise, key = IndependentNoise(2, VOCABULARY), IndependentNoise.key
    monkeypatch.setattr(
        IndependentNoise, "key", lambda self, *path: used.append(path) or key(self, *path)
    )
    context, recorder = TableContext(), Recorder()
    guesser = partly_right(context.greedy([1], 200), 3, abstain=0.2)
    settings = Sampling(temperature=1.0)
    loop = decoding(
        context, guesser, room=60, settings=settings, noise=noise, rule=rule, recorder=recorder
    )
    run(loop)
    stats = figures(recorder)
    assert stats.accepted < stats.drafted
    assert len(used) == len(set(used)) >= stats.drafted + stats.rounds


def test_a_step_that_was_interrupted_in_its_middle_is_not_gone_on_with() -> None:
    class Interrupted(Guesser):
        def propose(self, *settings: object) -> Proposal:
            raise KeyboardInterrupt

    loop = decoding(TableContext(2), Interrupted(lambda position, limit: [0]))
    with pytest.raises(KeyboardInterrupt):
        first_round(loop)
    with pytest.raises(DecodingError, match="interrupted"):
        loop.step()
    assert loop.sequences[0].finish("interrupted").finish_reason == "interrupted"


def test_architecture_prints_the_loop_as_it_is() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    methods = (Decoding._round, Decoding._submit, Decoding._commit)
    loop = "\n\n".join(textwrap.dedent(inspect.getsource(method)) for method in methods)
    assert f"```python\n{loop}```" in page, "copy the methods into docs/architecture.md"
    assert loop.count("\n") <= 120
