"""What one decoder step of our T5 takes, against the same weights in two other programs.

    python scripts/measure_t5_step.py --models weights/t5-enfr t5-small t5-base --turns 30

Against transformers (torch, one thread and two) where torch is installed, and against `Simple`
below: a straightforward T5 in MLX, with the BLAS that we have, that projects the encoder's memory
and the positions again in every step. A step is one token behind 16 others, float32, waited for.
All have the same weights, of a directory or random ones of a known shape; their logits are compared
before anything is timed. They take turns; the output is JSON on standard output: medians in
milliseconds, and medians of what the others take over what we take in the same turn.

Where others use the machine, --cpu-time measures this process's CPU time (of one thread each: a
second one spins while it waits).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mlx_specdec import blas

blas.load()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from mlx_specdec.bench.hugging_face import (  # noqa: E402
    HuggingFace,
    NoBaselineError,
    build,
    hugging_face,
)
from mlx_specdec.checkpoints.files import read_config  # noqa: E402
from mlx_specdec.models.loading import load_model  # noqa: E402
from mlx_specdec.models.outline import outline  # noqa: E402
from mlx_specdec.models.t5_config import T5Config  # noqa: E402
from mlx_specdec.models.t5_layers import ACTIVATIONS  # noqa: E402
from mlx_specdec.models.t5_stack import buckets  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "t5-small": {"d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "t5-base": {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 12},
}
BEFORE = 16
"""Tokens that the decoder has seen before the step."""
WARM = 2
THREADS = (1, 2)
LARGEST_DIFFERENCE = 1e-3
"""Of logits over the largest logit: what may be rounding."""

Clock = Callable[[], float]
Step = Callable[[], np.ndarray]
"""Logits (vocabulary,) of one token after those before it, which is then taken back."""


@dataclass(frozen=True)
class Timed:
    """One of those that take turns. around: entered while it works."""

    name: str
    step: Step
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def logits(self) -> np.ndarray:
        """Of the step."""
        with self.around():
            return self.step().copy()

    def seconds(self, clock: Clock) -> float:
        """Of the last of a few steps, so that nobody pays for what ran before."""
        with self.around():
            for _ in range(WARM):
                self.step()
            started = clock()
            self.step()
            return clock() - started


class Simple:
    """A T5 decoder as one writes it down first; gated and plain feed-forward networks."""

    def __init__(self, config: T5Config, weights: Mapping[str, mx.array], memory: mx.array) -> None:
        self._config = config
        self._weights = weights
        self._memory = memory
        self._caches: list[tuple[mx.array, mx.array] | None] = [None] * config.num_decoder_layers

    def see(self, token: int, *, keep: bool) -> mx.array:
        """Logits (1, 1, vocabulary) after one more token."""
        before = list(self._caches)
        states = self._weights["shared.weight"][mx.array([[token]])]
        for index in range(self._config.num_decoder_layers):
            states = self._block(f"decoder.block.{index}.layer", index, states)
        states = self._norm("decoder.final_layer_norm", states)
        if self._config.scales_output:
            states = states * self._config.d_model**-0.5
        if not keep:
            self._caches = before
        return states @ self._weights.get("lm_head.weight", self._weights["shared.weight"]).T

    def _block(self, path: str, index: int, states: mx.array) -> mx.array:
        normed, name = self._norm(f"{path}.0.layer_norm", states), f"{path}.0.SelfAttention"
        keys, values = self._heads(f"{name}.k", normed), self._heads(f"{name}.v", normed)
        cache = self._caches[index]
        if cache is not None:
            keys = mx.concatenate([cache[0], keys], axis=2)
            values = mx.concatenate([cache[1], values], axis=2)
        self._caches[index] = keys, values
        states = states + self._attend(name, normed, keys, values, self._bias(index, keys.shape[2]))
        normed, name = self._norm(f"{path}.1.layer_norm", states), f"{path}.1.EncDecAttention"
        keys, values = (self._heads(f"{name}.{part}", self._memory) for part in "kv")
        states = states + self._attend(name, normed, keys, values, None)
        normed, name = self._norm(f"{path}.2.layer_norm", states), f"{path}.2.DenseReluDense"
        act = ACTIVATIONS[self._config.feed_forward]
        if self._config.feed_forward.startswith("gated-"):
            inner = act(self._apply(f"{name}.wi_0", normed)) * self._apply(f"{name}.wi_1", normed)
        else:
            inner = act(self._apply(f"{name}.wi", normed))
        return states + self._apply(f"{name}.wo", inner)

    def _attend(
        self, name: str, states: mx.array, keys: mx.array, values: mx.array, bias: mx.array | None
    ) -> mx.array:
        scores = self._heads(f"{name}.q", states) @ keys.transpose(0, 1, 3, 2)
        if bias is not None:
            scores = scores + bias
        mixed = mx.softmax(scores, axis=-1) @ values
        return self._apply(f"{name}.o", mixed.transpose(0, 2, 1, 3).reshape(1, 1, -1))

    def _bias(self, index: int, width: int) -> mx.array:
        """(1, heads, 1, width), of the newest position."""
        config, distances = self._config, np.arange(1 - width, 1)
        near = buckets(distances, config.num_buckets, config.max_distance, both_ways=False)
        place = f"decoder.block.{index if config.bias_per_layer else 0}.layer.0.SelfAttention"
        table = self._weights[f"{place}.relative_attention_bias.weight"]
        return table[mx.array(near)].T[None, :, None]

    def _heads(self, name: str, states: mx.array) -> mx.array:
        shape = (1, -1, self._config.num_heads, self._config.d_kv)
        return self._apply(name, states).reshape(shape).transpose(0, 2, 1, 3)

    def _norm(self, name: str, states: mx.array) -> mx.array:
        return mx.fast.rms_norm(states, self._weights[f"{name}.weight"], self._config.epsilon)

    def _apply(self, name: str, states: mx.array) -> mx.array:
        return states @ self._weights[f"{name}.weight"].T


def our_step(model: Any, source: Sequence[int], seen: Sequence[int]) -> Step:
    """Of the context that decoding uses."""
    context = model.open(source)
    mx.eval(context.advance(mx.array([list(seen)])).logits)
    token = mx.array([seen[-1:]])

    def step() -> np.ndarray:
        logits = context.advance(token, proposed=1).logits
        mx.eval(logits)
        context.rewind((len(seen),))
        return np.array(logits)[0, 0]

    return step


def simple_step(model: Any, source: Sequence[int], seen: Sequence[int]) -> Step:
    """Of the straightforward T5."""
    network = model.network
    memory = network.encode(mx.array([list(source)]))
    simple = Simple(network.config, dict(tree_flatten(network.parameters())), memory)
    for token in seen:
        mx.eval(simple.see(token, keep=True))

    def step() -> np.ndarray:
        logits = simple.see(seen[-1], keep=False)
        mx.eval(logits)
        return np.array(logits)[0, 0]

    return step


def torch_step(
    hugging: HuggingFace, theirs: Any, source: Sequence[int], seen: Sequence[int]
) -> Step:
    """Of transformers, with its own caches."""
    torch = hugging.torch
    with hugging.at_work(seed=0):
        memory = theirs.get_encoder()(torch.tensor([list(source)]))
        told = {"encoder_outputs": memory, "use_cache": True}
        cache = theirs(decoder_input_ids=torch.tensor([list(seen)]), **told).past_key_values
        token = torch.tensor([[seen[-1]]])

    def step() -> np.ndarray:
        logits = theirs(decoder_input_ids=token, past_key_values=cache, **told).logits
        cache.self_attention_cache.crop(-1)
        return logits[0, 0].numpy()

    return step


def compare(
    model: Any,
    config: Mapping[str, Any],
    length: int,
    hugging: HuggingFace | None,
    *,
    turns: int,
    clock: Clock,
) -> dict[str, Any]:
    """All figures of a model behind a source of `length` tokens."""
    random = np.random.default_rng(0)
    source, seen = (random.integers(2, model.vocabulary, n).tolist() for n in (length, BEFORE))
    steps = [
        Timed("ours", our_step(model, source, seen)),
        Timed("simple", simple_step(model, source, seen)),
    ]
    if hugging is not None:
        theirs = build(hugging, config, model.network)
        for threads in THREADS if clock is not time.process_time else THREADS[:1]:
            kind = replace(hugging, threads=threads)
            name = f"transformers, {threads} thread{'s' * (threads > 1)}"
            step = torch_step(kind, theirs, source, seen)
            steps.append(Timed(name, step, partial(kind.at_work, seed=0)))
    difference = check([each.logits() for each in steps])
    return {"source": length, "difference": difference, **figures(steps, turns, clock)}


def check(logits: Sequence[np.ndarray]) -> float:
    """The largest difference to the first. Ends the program where that is not rounding."""
    difference = max(float(np.abs(each - logits[0]).max()) for each in logits)
    if difference > LARGEST_DIFFERENCE * float(np.abs(logits[0]).max()):
        raise SystemExit(f"logits differ by {difference}: these are not the same models")
    return difference


def figures(steps: Sequence[Timed], turns: int, clock: Clock) -> dict[str, Any]:
    """Every step in turns, after two that do not count; the first one changes from turn to turn."""
    taken: dict[str, list[float]] = {each.name: [] for each in steps}
    for turn in range(-2, turns):
        for place in range(len(steps)):
            each = steps[(place + turn) % len(steps)]
            taken[each.name].append(each.seconds(clock))
    kept = {name: times[2:] for name, times in taken.items()}
    return {
        "milliseconds": {name: round(1e3 * median(times), 3) for name, times in kept.items()},
        "over ours": {
            name: round(median(a / b for a, b in zip(times, kept["ours"], strict=True)), 2)
            for name, times in kept.items()
            if name != "ours"
        },
    }


def opened(name: str) -> tuple[Any, Mapping[str, Any]]:
    """A T5 and its config.json: of a directory, or random weights of one of SHAPES."""
    if name in SHAPES:
        t5 = {"model_type": "t5", "vocab_size": 32128, "d_kv": 64, "decoder_start_token_id": 0}
        config = {**t5, **SHAPES[name]}
        return outline(config, name, dtype="float32").model(), config
    directory = Path(name)
    return load_model(directory).model, read_config(directory)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["weights/t5-enfr", *SHAPES])
    parser.add_argument("--sources", nargs="+", type=int, default=[32, 512])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    hugging: HuggingFace | None = None
    try:
        hugging = hugging_face()
        print(hugging.describe(), file=sys.stderr)
    except NoBaselineError as problem:
        print(f"transformers is left out: {problem}", file=sys.stderr)
    found = []
    for name in args.models:
        model, config = opened(name)
        for length in args.sources:
            row = compare(model, config, length, hugging, turns=args.turns, clock=clock)
            print(name, json.dumps(row), file=sys.stderr)
            found.append({"model": name, **row})
    print(
        json.dumps(
            {"blas": blas.name(), "mlx": mx.__version__, "clock": clock.__name__, "steps": found},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
