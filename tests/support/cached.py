"""Runs with a prompt cache."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_specdec.engine.generate import stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.request import Result
from mlx_specdec.interfaces.results import TARGET, KVSlice
from mlx_specdec.options import Options

ROOM = 1 << 24
SYSTEM = [11, 40, 23, 5, 9, 31, 7, 8, 60, 2, 19, 33]


def run(pair: Pair, prompt: Sequence[int], options: Options, cache: PromptCache) -> Result:
    return stream_generate(pair, list(prompt), options, cache=cache).result()


def known(cache: PromptCache, text: Sequence[int]) -> list[tuple[str, int, tuple[mx.array, ...]]]:
    found = cache.find(text, len(text))
    parts = {TARGET: found.target, **found.proposer}
    slices = [(name, part) for name, part in sorted(parts.items()) if isinstance(part, KVSlice)]
    return [(name, part.length, part.arrays) for name, part in slices]
