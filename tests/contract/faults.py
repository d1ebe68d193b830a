"""Failures that are planted from outside, and models that damage themselves."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

PARTS = "target", "proposer"
HOWS = "before", "after", "logits", "row", "states"


@contextmanager
def fail(
    pair: Any,
    part: str,
    *,
    call: int,
    how: str = "before",
    error: type[BaseException] = RuntimeError,
) -> Iterator[list[int]]:
    """Let one pass of the target or of the draft model fail, and yield a list that becomes not
    empty when it does.

    This relies on one fact: mlx-lm's class `mlx_lm.models.<model_type>.Model` computes the passes
    of a decoder-only model, one call per pass. So target and draft model must be of two types.
    Whatever decodes the requests and in whichever thread, it makes this call.

    Args:
        pair: What `load` returned for two directories, or anything else with `name` and
            `draft_name`.
        part: "target" or "proposer".
        call: The pass that fails, counted from 1 since this context was entered.
        how: "before" raises before the pass has done anything, "after" raises when it has done
            everything. "logits" makes all logits of the pass NaN, "row" those of the first
            sequence, and "states" also all that the pass adds to the KV cache.
        error: The exception that is raised."""
    names = dict(zip(PARTS, (pair.name, pair.draft_name), strict=True))
    config = json.loads((Path(names[part]) / "config.json").read_text())
    network = import_module(f"mlx_lm.models.{config['model_type']}").Model
    shipped, lock, calls, fired = network.__call__, threading.Lock(), 0, list[int]()

    def passes(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            now = calls == call
        if not now:
            return shipped(module, *arguments, **named)
        fired.append(call)
        if how == "before":
            raise error("planted")
        embed = nn.Embedding.__call__
        damage = mx.nan if how == "states" else 1.0
        with patch.object(nn.Embedding, "__call__", lambda *given: embed(*given) * damage):
            logits = shipped(module, *arguments, **named)
        if how == "after":
            raise error("planted")
        damaged = mx.arange(logits.shape[0])[:, None, None] < (1 if how == "row" else len(logits))
        return mx.where(damaged, mx.nan, logits)

    with patch.object(network, "__call__", passes):
        yield fired


def poison(checkpoint: Path, token: int) -> None:
    """Let the MLP of a model of `learned` overflow after one token, so that the logits after this
    token are NaN. Logits after other tokens stay as they are."""
    file = str(checkpoint / "model.safetensors")
    weights = dict(mx.load(file))
    [code] = [weight[token] for name, weight in weights.items() if "embed_tokens" in name]
    for name, weight in weights.items():
        if "gate_proj" in name or "up_proj" in name:
            # The square of 128 times this is just too large for float32.
            weights[name] = mx.concatenate([1.6e17 * code[None], weight[1:]])
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
