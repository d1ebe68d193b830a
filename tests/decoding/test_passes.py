"""`target_passes` counts every pass that the target's network computed after the prefill."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import Options, generate
from mlx_specdec.interfaces import Scores
from mlx_specdec.models.distributed.leader import Leader, led
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.pairs import PROMPT, pair_of, perturbed
from ..support.shadows import CheckedContext
from ..support.thread_ranks import ends

RECURRENT = ("qwen3_next", "mamba2", "lfm2", "falcon_h1")
GREEDY = Options(max_tokens=12, temperature=0.0, cost_cache=False, num_draft=3)


class Counted:
    """Counts the calls of a network."""

    def __init__(self, model: DecoderOnlyModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        run = model.run

        def counted(*args: Any, **named: Any) -> Any:
            self.calls += 1
            return run(*args, **named)

        monkeypatch.setattr(model, "run", counted)


def fresh(family: str) -> Any:
    draft = DecoderOnlyModel(perturbed(tiny.build(family), 0.3))
    return pair_of(DecoderOnlyModel(tiny.build(family)), draft)


@pytest.mark.parametrize("family", ["llama", "gemma3", *RECURRENT])
@pytest.mark.parametrize("regular", [False, True])
def test_every_pass_of_the_target_counts(
    family: str, regular: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = fresh(family)
    # What the model can do is found out in passes that are no part of the output.
    assert pair.target.rows_agree
    pair.target.why_not_batched  # noqa: B018  the trial runs now
    counted = Counted(pair.target, monkeypatch)  # type: ignore[arg-type]
    stats = generate(pair, PROMPT, replace(GREEDY, regular=regular)).stats
    assert stats.target_passes == counted.calls - 1  # one pass reads the prompt
    assert stats.target_passes == stats.rounds


def test_a_pass_of_two_rows_for_exact_output_counts_once() -> None:
    pair = fresh("llama")
    stats = generate(pair, PROMPT, replace(GREEDY, exact=True, regular=True)).stats
    assert stats.target_passes == stats.rounds


def rejected(context: Any) -> int:
    context.advance(mx.array([PROMPT]))
    context.advance(mx.array([[3, 4, 5]]), proposed=2)
    passes: int = context.rewind((len(PROMPT) + 1,))
    return passes


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_rewind_takes_no_pass_in_any_wrapper_of_a_context(family: str) -> None:
    model = DecoderOnlyModel(tiny.build(family))
    led_model = led(model, Leader(ends()[1]))
    for context in (model.open(PROMPT), CheckedContext(model, PROMPT), led_model.open(PROMPT)):
        context.advance(mx.array([PROMPT]))
        context.advance(mx.array([[3, 4, 5]]), proposed=2)
        context.rewind((len(PROMPT) + 1,))


def test_the_rows_of_a_sequence_are_cut_out_only_if_they_are_read() -> None:
    logits, states = mx.arange(24).reshape(2, 3, 4), mx.arange(12).reshape(2, 3, 2)
    whole = Scores(logits, {"final": states}, [mx.array([1]), mx.array([2])])
    row = whole.of(1, 2)
    assert not {"logits", "hidden", "encoded"} & row.__dict__.keys()
    assert mx.array_equal(row.logits, logits[1:, :2])
    assert mx.array_equal(row.hidden["final"], states[1:, :2])
    assert [one.item() for one in row.encoded] == [2]
