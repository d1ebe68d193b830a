"""Attention that mlx-lm's networks call instead of mlx-lm's, in the same arithmetic. Passes of a
few rows are absorbed into a latent or divided for Metal's kernel. Rows over a quantized cache are
divided because their scores would fill the memory."""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import RotatingKVCache

from ..attention_parts import attend_by_kernel, in_parts
from ..exact import rows_attend_alone
from ..patches import ATTENTION
from . import latent

NAME = "scaled_dot_product_attention"
SCORES_NBYTES = 64 << 20
"""Upper bound on the bytes of scores in memory at once, for a layer over a quantized cache whose
single rows do not need more."""
_all_rows = base.quantized_scaled_dot_product_attention


def replace_in(network: nn.Module) -> None:
    """Have the modules of a network call `attend`, if it is mlx-lm's attention that they call."""
    kinds = {kind for module in network.modules() for kind in type(module).__mro__}
    for scope in [sys.modules.get(name) for name in {kind.__module__ for kind in kinds}]:
        if getattr(scope, NAME, None) is base.scaled_dot_product_attention:
            ATTENTION.apply(scope, NAME, attend)


def attend(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> Any:
    """Compute mlx-lm's attention; a pass of a few rows is absorbed, or divided for the kernel."""
    absorbed = latent.absorbed(queries, keys, values, cache, scale, mask)
    if absorbed is not None:
        return absorbed

    def mixed(queries: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
        result: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache, scale, mask, sinks
        )
        return result

    if isinstance(keys, mx.array) or rows_attend_alone():
        window = cache.max_size if type(cache) is RotatingKVCache else None
        return attend_by_kernel(mixed, queries, keys, values, mask, window)
    # A quantized cache, for which there is no such kernel.
    return mixed(queries, keys, values, mask)


def attend_in_parts(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, **how: int
) -> mx.array:
    """Compute mlx-lm's attention over a quantized cache a few query rows at a time. It has no fused
    kernel, and all scores at once would take more memory than quantizing the cache saves."""
    batch, heads, rows, _ = queries.shape
    # Scores, what the mask leaves of them, and their softmax.
    row = 3 * batch * heads * keys[0].shape[-2] * queries.dtype.size
    most = max(1, SCORES_NBYTES // row)
    if rows <= most:
        return _all_rows(queries, keys, values, scale, mask, **how)
    done = []
    for few, some_keys, some_values, part in in_parts(most, queries, keys, values, mask):
        done.append(_all_rows(few, some_keys, some_values, scale, part, **how))
        # One after the other, or the scores of all would be in memory together.
        mx.eval(done[-1])
    return mx.concatenate(done, axis=2)
