"""How many tokens a text drafts, and the costs of rounds that are kept from text to text.

Knows options, pairs and the cache of costs. Knows nothing of decoding a text.
"""

from __future__ import annotations

import functools
from importlib.metadata import version

import mlx.core as mx

from . import blas
from .costs import cache as cost_cache
from .costs.cache import CostKey
from .decoding.draft_length import AutoLength, DraftLength, FixedLength
from .decoding.lengths_by_source import LengthsBySource
from .options import Options
from .pair import Pair
from .proposers import most_drafted, proposer_bytes, sources


def make_draft_length(pair: Pair, options: Options) -> DraftLength:
    """What chooses the number of drafted tokens, with the costs that earlier texts measured."""
    lengths = {name: _length(pair, options, name) for name in sources(pair, options)}
    if len(lengths) > 1:
        return LengthsBySource(lengths)
    return next(iter(lengths.values()), FixedLength(0))


def keep_costs(pair: Pair, options: Options, lengths: DraftLength) -> None:
    """Write down the costs that a text has measured, if they are to be kept."""
    if not options.cost_cache:
        return
    measured: dict[str, dict[int, float]] = {}
    if isinstance(lengths, LengthsBySource):
        measured = lengths.measured()
    elif isinstance(lengths, AutoLength):
        measured = {"".join(sources(pair, options)): lengths.measured()}
    for source, costs in measured.items():
        cost_cache.merge(cost_key(pair, options, source), costs)


def cost_key(pair: Pair, options: Options, source: str) -> CostKey:
    """What the costs of rounds depend on that this source drafts."""
    return CostKey(
        device=device_name(),
        mlx=_mlx_version(),
        blas=blas.name(),
        target=pair.name,
        target_bytes=pair.target.nbytes,
        draft=pair.draft_name or "" if source == "draft" else source,
        draft_bytes=proposer_bytes(pair, source),
        dtype=pair.dtype,
        sampled=options.temperature > 0,
    )


def device_name() -> str:
    """Where MLX computes: "cpu", or the accelerator's own name."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))


@functools.cache
def _mlx_version() -> str:
    """Read once: looking it up takes as long as a step of a small model."""
    return version("mlx")


def _length(pair: Pair, options: Options, source: str) -> DraftLength:
    if options.num_draft != "auto":
        return FixedLength(options.num_draft)
    known = cost_cache.read(cost_key(pair, options, source)) if options.cost_cache else None
    return AutoLength(known, most_drafted(pair, source))
