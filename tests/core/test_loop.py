"""The loop: one target pass per round, and a proposer sees every committed token once."""

import inspect
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.core.loop import Group
from mlx_specdec.core.noise import IndependentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.core.worth import Worth
from mlx_specdec.engine.generate import generate, stream_generate, stream_many
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import DecodingError
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.types import Proposal, Proposer, Scores

from ..support import tiny
from ..support.pairs import PROMPT, decoder_only, pair_of, perturbed
from ..support.shipped import ROOT

RECURRENT = ("qwen3_next", "mamba2", "lfm2", "falcon_h1")
GREEDY = Options(max_tokens=12, num_draft=3, temperature=0.0, cost_cache=False)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return decoder_only("llama")


def shapes_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which each pass of the target adds its number of rows and its width."""
    target: Any = pair.target
    # What the model can do is found out in passes that are no part of the output.
    assert target.rows_agree is not target.why_not_batched
    seen: list[tuple[int, ...]] = []
    run = target.run

    def counted(tokens: mx.array, *args: Any, **named: Any) -> Any:
        seen.append(tokens.shape)
        return run(tokens, *args, **named)

    monkeypatch.setattr(target, "run", counted)
    return seen


class Guesser(Proposer):
    """A proposer that drafts `guess(position, limit)`, and records what it observes."""

    def __init__(self, guess: Callable[[int, int], list[int]], hidden: tuple[str, ...] = ()):
        self._guess, self.hidden = guess, hidden
        self.begun: list[list[int]] = []
        self.observed: list[tuple[list[int], Scores]] = []

    def guess(self, committed: Sequence[Sequence[int]], limit: int) -> list[int]:
        return self._guess(len(committed[0]) - len(PROMPT), limit)

    def begin(self, prompts: Any) -> None:
        self.begun += map(list, prompts)

    def ready(self, committed: Any, limit: int) -> bool:
        return bool(self.guess(committed, limit))

    def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
        return Proposal.one_hot([self.guess(committed, limit)[:limit]])

    def observe(self, tokens: Any, scores: Any) -> None:
        self.observed.append((list(tokens[0]), scores[0]))


def partly_right(tokens: Sequence[int], **named: Any) -> Guesser:
    """Return a proposer that drafts a completion with errors, or sometimes nothing."""
    dice = random.Random(5)

    def guess(position: int, limit: int) -> list[int]:
        right = tokens[position : position + limit]
        return [token if dice.random() < 0.7 else 3 for token in right if dice.random() < 0.9]

    return Guesser(guess, **named)


@pytest.mark.parametrize("family", ["llama", "gemma3", *RECURRENT])
@pytest.mark.parametrize("regular", [False, True])
def test_every_pass_of_the_target_counts_and_a_rewind_takes_none(
    family: str, regular: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = DecoderOnlyModel(perturbed(tiny.build(family), 0.3))
    pair = pair_of(DecoderOnlyModel(tiny.build(family)), draft)
    shapes = shapes_of(pair, monkeypatch)
    stats = generate(pair, PROMPT, replace(GREEDY, regular=regular)).stats
    assert stats.target_passes == stats.rounds == len(shapes) - 1, "the first one is the prefill"


def test_a_pass_of_two_rows_for_exact_output_counts_once(pair: Pair) -> None:
    stats = generate(pair, PROMPT, replace(GREEDY, exact=True, regular=True)).stats
    assert stats.target_passes == stats.rounds


def test_a_speculative_round_is_one_pass_over_the_newest_token_and_the_draft(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(pair, PROMPT, replace(GREEDY, regular=True)).tokens
    shapes = shapes_of(pair, monkeypatch)
    right = Guesser(lambda position, limit: list(plain[position : position + limit]))
    assert stream_generate(pair, PROMPT, GREEDY, proposer=right).result().tokens == plain
    assert shapes == [(1, len(PROMPT) - 1), (1, 4), (1, 4), (1, 4)]


@pytest.mark.parametrize("proposer", [None, Guesser(lambda position, limit: [])])
def test_without_a_draft_the_next_pass_is_submitted_before_the_last_token_is_read(
    proposer: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, counts = shapes_of(pair, monkeypatch), []
    options = replace(GREEDY, regular=proposer is None)
    for step in stream_generate(pair, PROMPT, options, proposer=proposer):
        if step.tokens:
            counts.append(len(shapes) - 1)
    assert counts == [*range(2, 13), 12], "no pass is wasted at the end"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_observe_gets_each_committed_token_once_with_its_own_scores(pair: Pair, count: int) -> None:
    options = replace(GREEDY, num_draft=count, max_tokens=24)
    plain = generate(pair, PROMPT, options).tokens
    guesser = partly_right(plain, hidden=("final",))
    stream_generate(pair, PROMPT, options, proposer=guesser).result()
    committed = [*PROMPT, *plain]
    assert guesser.begun == [PROMPT]
    seen = [token for tokens, _ in guesser.observed for token in tokens]
    # The tokens of the last round are not observed, because the completion has ended.
    assert seen == committed[: len(seen)] and len(committed) - len(seen) <= count + 2
    whole = pair.target.open_batch([PROMPT]).advance(mx.array([seen]), 0, ("final",))
    for found, expected in (
        ([scores.logits for _, scores in guesser.observed], whole.logits),
        ([scores.hidden["final"] for _, scores in guesser.observed], whole.hidden["final"]),
    ):
        assert mx.allclose(mx.concatenate(found, axis=1), expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:the prompt has")
@pytest.mark.parametrize("length", [1, 2, 512, 513, 514, 1100])
def test_the_prompt_is_prefilled_in_chunks_all_but_its_last_token(
    length: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, progress = shapes_of(pair, monkeypatch), list[tuple[int, int]]()
    prompt = [3 + place % 50 for place in range(length)]
    options = replace(GREEDY, max_tokens=1, regular=True, prefill_step_size=512)
    run = stream_generate(pair, prompt, options, progress=lambda *done: progress.append(done))
    run.result()
    *prefill, last = [width for _, width in shapes]
    assert (sum(prefill), last) == (length - 1, 1)
    assert len(prefill) == -(-(length - 1) // 512) and max(prefill, default=0) <= 512
    assert progress[0] == (0, length) and progress[-1] == (length, length)
    assert progress == sorted(progress)


def test_rounds_after_a_prefill_a_join_or_another_groups_round_teach_no_costs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[tuple[int, bool]] = []
    real = Worth.learn

    def learn(self: Worth, rows: Any, steps: Any, proposal: Any, timed: Any) -> None:
        rounds.append((len(rows), timed.interval is not None))
        real(self, rows, steps, proposal, timed)

    monkeypatch.setattr(Worth, "learn", learn)

    def found(*requests: tuple[int, dict[str, Any]]) -> list[tuple[int, bool]]:
        """Decode prompts of these lengths, with these options."""
        rounds.clear()
        plain = replace(GREEDY, regular=True, max_tokens=4, prefill_step_size=8)
        made = [Request((PROMPT * 9)[:length], replace(plain, **how)) for length, how in requests]
        list(stream_many(pair, made, plain, batch_size=2))
        return list(rounds)

    alone = [(1, False), *[(1, True)] * 3]
    assert found((5, {})) == alone
    # The second prompt is prefilled in 8 chunks between the rounds of the first one.
    assert found((5, {}), (63, {})) == [(1, False)] * 4 + alone
    joined = found((5, {"max_tokens": 12}), (63, {}))
    assert joined == [(1, False)] * 9 + [(2, False), *[(2, True)] * 3]
    # Another rule makes another group, whose rounds alternate with those of the first one.
    other = {"temperature": 0.5, "rule": "token"}
    assert found((5, {}), (5, other)) == [(1, False)] * 7 + [(1, True)]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_no_key_is_used_twice_in_a_whole_completion(
    rule: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[int | str, ...]] = []
    key = IndependentNoise.key
    monkeypatch.setattr(
        IndependentNoise, "key", lambda self, *path: used.append(path) or key(self, *path)
    )
    options = replace(GREEDY, temperature=1.0, max_tokens=60, rule=rule)
    stats = stream_generate(pair, PROMPT, options, proposer=partly_right([3] * 70)).result().stats
    assert stats.accepted < stats.drafted
    assert len(used) == len(set(used)) >= stats.drafted + stats.rounds


def test_a_step_that_was_interrupted_in_its_middle_is_not_continued(pair: Pair) -> None:
    def interrupted(position: int, limit: int) -> list[int]:
        raise KeyboardInterrupt

    run = stream_generate(pair, PROMPT, GREEDY, proposer=Guesser(interrupted))
    with pytest.raises(KeyboardInterrupt):
        run.result()
    with pytest.raises(DecodingError, match="interrupted"):
        run.result()
    assert run.interrupt().finish_reason == "interrupted"


def test_architecture_prints_the_loop_as_it_is() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    loop = textwrap.dedent(inspect.getsource(Group._round))
    assert f"```python\n{loop}```" in page, "copy the method into docs/architecture.md"
    assert loop.count("\n") <= 50
