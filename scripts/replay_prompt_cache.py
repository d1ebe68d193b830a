"""Replays a conversation of ten turns with a prompt cache on disk, before and after a restart.

    python scripts/replay_prompt_cache.py

For a plain, a windowed and a recurrent family, and a mixed one: the share of the prompts' tokens
that was cached, the seconds of reading prompts, and how many texts differ from those without
a cache. Before the restart each turn is new; after it the same turns come again, and one more.
Models are random, so that seconds are of use as ratios alone.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlx_specdec import Options
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from tests.support import tiny
from tests.support.pairs import pair_of, perturbed

FAMILIES = {"plain": "llama", "windowed": "gemma3", "recurrent": "mamba2", "mixed": "qwen3_next"}
TURNS, SYSTEM, QUESTION = 10, 400, 60
OPTIONS = Options(max_tokens=12, num_draft=2, cost_cache=False)
BOUND = 1 << 30


def replayed(
    pair: Pair, prompts: list[list[int]], plain: list[tuple[int, ...]], cache: PromptCache
) -> dict[str, float]:
    """Return figures of a conversation. Seconds include those of looking into the cache."""
    cached = total = differing = 0
    seconds = 0.0
    for prompt, expected in zip(prompts, plain, strict=False):
        begun = time.perf_counter()
        result = stream_generate(pair, prompt, OPTIONS, cache=cache).result()
        whole, parts = time.perf_counter() - begun, result.stats.seconds
        seconds += whole - (parts.total - parts.load - parts.prompt)
        cached, total = cached + result.labels.cached_tokens, total + len(prompt)
        differing += tuple(result.tokens) != tuple(expected)
    report = {"hit_rate": cached / total, "prompt_seconds": seconds, "differing": differing}
    return {name: round(value, 3) for name, value in report.items()}


def main() -> None:
    """The command."""
    for kind, family in FAMILIES.items():
        draft = DecoderOnlyModel(perturbed(tiny.build(family), 0.2))
        pair = pair_of(DecoderOnlyModel(tiny.build(family)), draft)
        dice = random.Random(1)
        prompts, plain, prompt = [], [], [dice.randrange(3, 60) for _ in range(SYSTEM)]
        read = 0.0
        for _ in range(TURNS + 1):
            prompt = prompt + [dice.randrange(3, 60) for _ in range(QUESTION)]
            result = generate(pair, prompt, OPTIONS)
            prompts.append(prompt)
            plain.append(result.tokens)
            read += result.stats.seconds.prompt
            prompt = prompt + list(result.tokens)
        print(json.dumps({"kind": kind, "family": family, "without": round(read, 3)}))
        with tempfile.TemporaryDirectory() as place:
            for when in ("before", "after"):
                turns = prompts if when == "after" else prompts[:TURNS]
                cache = Store(BOUND, Path(place), BOUND).open(pair)
                assert cache is not None
                print(json.dumps({"restart": when, **replayed(pair, turns, plain, cache)}))
                begun = time.perf_counter()
                cache.close()
                files = [file.stat().st_size for file in Path(place).glob("*.safetensors")]
                took = round(time.perf_counter() - begun, 3)
                print(json.dumps({"files": len(files), "bytes": sum(files), "close": took}))


if __name__ == "__main__":
    main()
