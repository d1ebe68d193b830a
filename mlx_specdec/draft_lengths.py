"""How many tokens a text drafts, and the costs of rounds that are kept from text to text.

Knows options, pairs and the cache of costs. Knows nothing of decoding a text.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import mlx.core as mx

from . import blas
from .decoding import cost_cache
from .decoding.cost_cache import CostKey
from .decoding.draft_length import AutoLength, DraftLength, FixedLength
from .options import Options
from .pair import Pair
from .proposers import most_drafted, proposer_bytes, proposer_kind


def make_draft_length(pair: Pair, options: Options) -> DraftLength:
    """What chooses the number of drafted tokens, with the costs that earlier texts measured."""
    if options.num_draft != "auto":
        return FixedLength(options.num_draft)
    keeps = options.cost_cache and proposer_kind(pair, options) != "none"
    known = cost_cache.read(cost_key(pair, options)) if keeps else None
    return AutoLength(known, most_drafted(pair, options))


def keeper(pair: Pair, options: Options, lengths: DraftLength) -> Callable[[], None] | None:
    """What writes down the costs that a text has measured; None where nothing is kept."""
    if not isinstance(lengths, AutoLength) or not options.cost_cache:
        return None
    return lambda: cost_cache.merge(cost_key(pair, options), lengths.measured())


def cost_key(pair: Pair, options: Options) -> CostKey:
    """What the costs of this pair's rounds depend on."""
    kind = proposer_kind(pair, options)
    return CostKey(
        device=device_name(),
        mlx=version("mlx"),
        blas=blas.name(),
        target=pair.name,
        target_bytes=pair.target.nbytes,
        draft=pair.draft_name or "" if kind == "draft" else kind,
        draft_bytes=proposer_bytes(pair, options),
        dtype=pair.dtype,
        sampled=options.temperature > 0,
    )


def device_name() -> str:
    """Where MLX computes: "cpu", or the accelerator's own name."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))
