"""Kills a process while it writes blocks of a prompt cache, and reads what it left.

    python scripts/kill_prompt_cache.py [--kills 1000]

A child generates texts that begin alike, with a cache in a directory, and gets SIGKILL at a random
moment. Another child opens the directory, computes the columns of every cached text anew, compares
them, continues some texts with the cache and without it, and prints what it saw. The directory goes
from one kill to the next, and its bound is small, so that blocks are removed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx

from mlx_specdec import Options
from mlx_specdec.engine import prompt_cache
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.interfaces.results import KVSlice
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from tests.support import tiny
from tests.support.pairs import pair_of, perturbed

ROOM, BOUND = 1 << 26, 3 << 20
TOLERANCE = 1e-4
"""Of columns that passes of other lengths compute."""
OPTIONS = Options(max_tokens=8, num_draft=2, cost_cache=False)
FAMILIES = ("llama", "mamba2", "gemma3")


def pair_for(family: str) -> Pair:
    draft = DecoderOnlyModel(perturbed(tiny.build(family), 0.2))
    return pair_of(DecoderOnlyModel(tiny.build(family)), draft)


def opened(directory: Path, pair: Pair) -> PromptCache:
    cache = Store(ROOM, directory, BOUND).open(pair)
    assert cache is not None
    return cache


def prompt_of(dice: random.Random) -> list[int]:
    """A prompt that begins as one of three others, and branches somewhere."""
    text = random.Random(dice.randrange(3))
    shared = [text.randrange(3, 60) for _ in range(dice.randrange(8, 160))]
    return shared + [dice.randrange(3, 60) for _ in range(dice.randrange(1, 40))]


def write(directory: Path, family: str, seed: int, ready: int) -> None:
    """Generate until killed."""
    dice, pair = random.Random(seed), pair_for(family)
    cache = opened(directory, pair)
    os.write(ready, b"x")
    while True:
        stream_generate(pair, prompt_of(dice), OPTIONS, cache=cache).result()


def verify(directory: Path, family: str, seed: int) -> dict[str, int]:
    """Return how many tokens were read, and how many of them and of texts were wrong."""
    pair = pair_for(family)
    left = len(list(directory.glob(".*.partial")))
    cache = opened(directory, pair)
    texts = list(cache.texts)
    read = wrong = 0
    for text in texts:
        found = cache.find([*text, 3], len(text)).target
        if not isinstance(found, KVSlice):
            continue
        read += found.length
        context = pair.target.open(text)
        context.advance(mx.array([text[: found.length]], dtype=mx.int32))
        columns = context.reusable(0).columns
        assert columns is not None
        true = columns(0, found.length)
        pairs = zip(found.arrays, true, strict=True)
        wrong += not all(mx.allclose(one, other, atol=TOLERANCE).item() for one, other in pairs)
    differing = hits = 0
    dice = random.Random(seed)
    prompts = [[*text, 5, 6] for text in dice.sample(texts, min(3, len(texts)))]
    for prompt in [*prompts, prompt_of(dice)]:
        result = stream_generate(pair, prompt, OPTIONS, cache=cache).result()
        hits += result.labels.cached_tokens
        differing += result.tokens != generate(pair, prompt, OPTIONS).tokens
    cache.close()
    nbytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return {
        "half_written": left,
        "compared_columns": read,
        "wrong_columns": wrong,
        "hit_tokens": hits,
        "texts": len(prompts) + 1,
        "differing_texts": differing,
        "over_the_bound": int(nbytes > BOUND),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    kills = parser.parse_args().kills
    prompt_cache.STRETCH = 32
    sums: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        for kill in range(kills):
            dice, family = random.Random(kill), FAMILIES[kill % len(FAMILIES)]
            directory = Path(place, family)
            reading, writing = os.pipe()
            # This process computes nothing, so that children can be forked from it.
            if not (child := os.fork()):
                os.close(reading)
                write(directory, family, kill, writing)
            os.close(writing)
            os.read(reading, 1)
            time.sleep(0.3 * dice.random())
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(reading)
            if os.WTERMSIG(status) != signal.SIGKILL:
                sys.exit(f"child {kill} ended by itself")
            reading, writing = os.pipe()
            if not (child := os.fork()):
                try:
                    os.write(writing, json.dumps(verify(directory, family, kill)).encode())
                finally:
                    os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as stream:
                seen = json.loads(stream.read())
            os.waitpid(child, 0)
            for name, count in seen.items():
                sums[name] = sums.get(name, 0) + count
            if kill % 50 == 49 or kill == kills - 1:
                print(json.dumps({"kills": kill + 1, **sums}), flush=True)


if __name__ == "__main__":
    main()
