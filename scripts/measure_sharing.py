"""What the code for several machines costs a round on one machine.

    python scripts/measure_sharing.py --model weights/py-llama --draft-model weights/py-llama-draft

`calls` are those of functions in mlx_specdec/ranks during a text: none, since a target that is not
shared is not led. What is left are looks at a model whether it has a group of ranks: `looks` are
counted, one is timed many times over, and `share` is what they are of a round. `led` is for
comparison: the same text with every pass told to nobody, as rank 0 tells it to the others, in CPU
time of this process; texts of either kind take turns. One JSON object; medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import timeit
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from mlx_specdec import Options, blas, load, stream_generate

blas.load()

from mlx_specdec.assemble import Pair  # noqa: E402
from mlx_specdec.models.decoder_only import DecoderOnlyModel  # noqa: E402
from mlx_specdec.ranks import leader  # noqa: E402
from mlx_specdec.ranks.channel import Channel  # noqa: E402

RANKS = str(Path(leader.__file__).parent)
PROMPT = "def fibonacci(n):"
LOOKS = 1_000_000


def written(pair: Pair, options: Options) -> tuple[str, int, float]:
    """The text, its rounds, and the CPU seconds of this process."""
    started = time.process_time()
    result = stream_generate(pair, PROMPT, options).result()
    return result.text, result.stats.rounds, time.process_time() - started


def calls(pair: Pair, options: Options) -> int:
    """How often anything of the ranks is called while a text is written, in any thread."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(RANKS)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        written(pair, options)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


def looks(pair: Pair, options: Options) -> int:
    """How often a text asks a model for its group."""
    count = 0

    class Counting(DecoderOnlyModel):
        @property
        def group(self) -> None:  # type: ignore[override]
            nonlocal count
            count += 1

    models = [each for each in (pair.target, pair.draft) if isinstance(each, DecoderOnlyModel)]
    for each in models:
        each.__class__ = Counting
    try:
        written(pair, options)
    finally:
        for each in models:
            each.__class__ = DecoderOnlyModel
    return count


def look_seconds(pair: Pair) -> float:
    """One look; a T5 model is asked for nothing."""
    if not isinstance(pair.target, DecoderOnlyModel):
        return 0.0
    look = timeit.Timer("model.group is None", globals={"model": pair.target})
    return min(look.repeat(5, LOOKS)) / LOOKS


def led_to_nobody(pair: Pair) -> Pair:
    """A target that is told to others as rank 0 tells it, where there are none."""
    told = leader.Leader(Channel(0, lambda array: array))
    return replace(pair, target=leader.led(pair.target, told))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    pair = load(args.model, args.draft_model)
    options = Options(max_tokens=args.max_tokens, num_draft=args.num_draft, cost_cache=False)
    text, rounds, _ = written(pair, options)
    counted = {"calls": calls(pair, options), "looks": looks(pair, options) / rounds}
    led = led_to_nobody(pair)
    plain_seconds, led_seconds = [], []
    for _ in range(args.turns):
        for each, taken in ((pair, plain_seconds), (led, led_seconds)):
            same, _, seconds = written(each, options)
            assert same == text
            taken.append(seconds / rounds)
    one, round_seconds = look_seconds(pair), median(plain_seconds)
    more = median(second - first for first, second in zip(plain_seconds, led_seconds, strict=True))
    told = {
        **counted,
        "rounds": rounds,
        "look_ns": round(1e9 * one, 1),
        "round_us": round(1e6 * round_seconds, 1),
        "share": counted["looks"] * one / round_seconds,
        "led_us": round(1e6 * more, 1),
        "led_share": round(more / round_seconds, 4),
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
