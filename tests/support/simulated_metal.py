"""A simulation of how Metal rounds, on a CPU: bfloat16 activations, and sums in float32 whose order
depends on the number of rows.

- Products: one order for 1 row, another for 2 to 8 rows, a third for more rows. The same order for
  products with one column.
- Attention of at most 8 rows: each row is summed alone over a short cache. Over more than
  ONE_PASS_KEYS keys the sum is divided into blocks, whose number depends on the rows of the call.
- Attention of more rows: matrix products over all of them."""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_specdec.models.patches import _CHANGES as CHANGES
from mlx_specdec.models.patches import PRODUCTS

ONE_PASS_KEYS = 48
"""Keys of a call up to which a row's sum is not divided. On a Mac there are 1,024 or more; here the
outputs of the tests have to reach them."""
FEW = 8
"""Rows up to which products and attention compute each row alone."""
_multiply = mx.matmul


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace MLX's products and attention until the patch is undone."""
    for owner in (mx.array, mx):
        PRODUCTS.undo(owner)  # what pads products is to call those of this module
        patch.setattr(owner, CHANGES, (), raising=False)
    for kind in (nn.Linear, nn.QuantizedLinear):
        patch.setattr(kind, "__call__", _linear)
    patch.setattr(nn.QuantizedEmbedding, "as_linear", _linear)
    patch.setattr(nn.Embedding, "as_linear", _linear)
    patch.setattr(mx.array, "__matmul__", _product)
    patch.setattr(mx, "matmul", _product)
    patch.setattr(mx.fast, "scaled_dot_product_attention", attention)


def _linear(module: nn.Module, states: mx.array) -> mx.array:
    """Multiply (..., inputs) by a layer's weights, in float32, and round the result once."""
    made = (states @ _weights(module)).astype(states.dtype)
    return made + module["bias"] if "bias" in module else made


def _product(left: mx.array, right: mx.array) -> mx.array:
    """Multiply (..., rows, inputs) by (..., inputs, outputs). Products of the same shape sum in the
    same order, so a few rows are padded to FEW."""
    dtype = left.dtype if left.dtype == right.dtype else mx.float32
    left, right = left.astype(mx.float32), right.astype(mx.float32)
    if left.ndim == 1 or right.ndim == 1:
        return _multiply(left, right).astype(dtype)
    if right.shape[-1] == 1:
        return mx.sum(left * right.swapaxes(-1, -2), axis=-1, keepdims=True).astype(dtype)
    shape = left.shape
    if right.ndim == 2:
        left = left.reshape(-1, shape[-1])
    rows, half = left.shape[-2], shape[-1] // 2
    if 1 < rows <= FEW:
        left = mx.pad(left, [(0, 0)] * (left.ndim - 2) + [(0, FEW - rows), (0, 0)])
        multiply = _multiply if right.ndim == 2 else _sums
        made = multiply(left[..., half:], right[..., half:, :])
        made = (made + multiply(left[..., :half], right[..., :half, :]))[..., :rows, :]
    else:
        made = _multiply(left, right)
    made = made.reshape(*shape[:-1], -1) if right.ndim == 2 else made
    return made.astype(dtype)


def _sums(left: mx.array, right: mx.array) -> mx.array:
    """Multiply in an order that does not depend on the number of columns either. BLAS has another
    kernel for the last columns, which are those of other keys if a pass has more rows."""
    return mx.sum(left[..., None, :] * right.swapaxes(-1, -2)[..., None, :, :], axis=-1)


def _weights(module: nn.Module) -> mx.array:
    """Return a layer's weights, (inputs, outputs) in float32, which are made once."""
    made = module.__dict__.get("_simulated")
    if made is None or made[0] is not module["weight"]:
        stored = module["weight"]
        if "scales" in module:
            scales, biases = (module[name].astype(mx.float32) for name in ("scales", "biases"))
            values = mx.dequantize(stored, scales, biases, module.group_size, module.bits)
        else:
            values = stored.astype(mx.float32)
        made = module.__dict__["_simulated"] = stored, mx.contiguous(values.T)
        mx.eval(made[1])
    result: mx.array = made[1]
    return result


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: Any = None,
) -> mx.array:
    """Attend as mx.fast.scaled_dot_product_attention does, without sinks."""
    assert sinks is None
    heads, rows = queries.shape[1:3]
    group = heads // keys.shape[1]
    wanted = (queries.astype(mx.float32) * scale).reshape(
        queries.shape[0], keys.shape[1], group, rows, -1
    )
    wide = [array.astype(mx.float32)[:, :, None] for array in (keys, values)]
    if isinstance(mask, str):
        count = keys.shape[2]
        mask = mx.arange(count) <= mx.arange(count - rows, count)[:, None]
    if mask is not None:
        mask = mx.broadcast_to(mask, (queries.shape[0], heads, rows, keys.shape[2]))
        mask = mask.reshape(*wanted.shape[:4], keys.shape[2])
    if rows > FEW or rows * group > 4 * FEW:
        mixed = _attend(wanted, *wide, mask)
    else:
        blocks = 1 if keys.shape[2] <= ONE_PASS_KEYS else 2 * rows
        mixed = mx.concatenate(
            [
                _attend_in_blocks(
                    wanted[..., row : row + 1, :],
                    *wide,
                    None if mask is None else mask[..., row : row + 1, :],
                    blocks,
                )
                for row in range(rows)
            ],
            axis=3,
        )
    return mixed.reshape(*queries.shape[:3], -1).astype(queries.dtype)


def _scores(wanted: mx.array, keys: mx.array, mask: mx.array | None) -> mx.array:
    scores = _multiply(wanted, keys.swapaxes(-1, -2))
    if mask is None:
        return scores
    return mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask


def _attend(wanted: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    return _multiply(mx.softmax(_scores(wanted, keys, mask), axis=-1), values)


def _attend_in_blocks(
    wanted: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, blocks: int
) -> mx.array:
    """Attend from one row. Masked keys add zero at the end of a sum, so they do not change it."""
    scores = _scores(wanted, keys, mask)
    shares = mx.exp(scores - mx.max(scores, axis=-1, keepdims=True))
    total = mixed = mx.array(0.0)
    for block in range(blocks):
        part = shares[..., block::blocks]
        total = total + mx.sum(part, axis=-1, keepdims=True)
        mixed = mixed + _multiply(part, values[..., block::blocks, :])
    return mixed / total


def off_cpu(patch: pytest.MonkeyPatch) -> None:
    """Have every module of the package find that it does not run on a CPU. One that is imported
    later would keep this after the patch is undone."""
    import mlx_specdec.models.loading
    import mlx_specdec.models.mlx_lm.family
    import mlx_specdec.training.collect  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_specdec.") and hasattr(module, "on_cpu"):
            patch.setattr(module, "on_cpu", lambda: False)
