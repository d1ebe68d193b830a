"""Measures where the costs of several rows jump: attention by rows, head shape and context, and
products with weights of 4, 8 and 16 bits by rows. Prints one JSON object.

On Metal an attention over at most 8 rows whose rows x (query heads / KV heads) is at most 32 runs
in one kernel, one over more rows in another, and what fits neither runs unfused; "divided" are
calls that fit the first. Each time is the median of several; each ratio is to one row."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import mlx.core as mx

from mlx_specdec.models.attention_parts import in_parts, kernel_rows

HEADS = ((32, 8, 128), (40, 8, 128), (28, 4, 128), (64, 8, 128), (24, 4, 256))
"""Query heads, KV heads and head width: of Qwen3-8B, Qwen3-14B, Qwen2.5-7B, Qwen3-32B and the
full layers of Qwen3.8-27B."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)
CONTEXTS = (512, 1024, 4096, 8192, 16384, 32768)
PRODUCT, SMALL_PRODUCT = (4096, 12288), (512, 1024)
MATRICES = 8
"""Matrices that a product goes through, so that no cache holds their bytes."""
TURNS = 9
"""Times that each cell is measured."""


def seconds(make: Callable[[], mx.array], turns: int) -> float:
    """Return the median time of computing an array; the first time warms up."""
    taken = []
    for _ in range(turns + 1):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(make())
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def attention(heads: int, kv: int, width: int, keys: int, rows: int, turns: int) -> dict[str, Any]:
    """Time one causal attention, and compare its last row with the same row alone."""
    dtype = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16
    q = mx.random.normal((1, heads, rows, width), key=mx.random.key(0)).astype(dtype)
    k, v = (
        mx.random.normal((1, kv, keys, width), key=mx.random.key(n)).astype(dtype) for n in (1, 2)
    )

    def several(some: mx.array = q) -> mx.array:
        # Not "causal" for one row, as models call it.
        mask = "causal" if some.shape[2] > 1 else None
        return mx.fast.scaled_dot_product_attention(some, k, v, scale=width**-0.5, mask=mask)

    def divided() -> mx.array:
        parts = in_parts(most, q, k, v, "causal")
        return mx.concatenate(
            [
                mx.fast.scaled_dot_product_attention(*part, scale=width**-0.5, mask=mask)
                for *part, mask in parts
            ],
            axis=2,
        )

    apart = mx.abs(several()[:, :, -1:] - several(q[:, :, -1:])).max().item()
    found = {"ms": round(1e3 * seconds(several, turns), 4), "last_row_apart": apart}
    if 0 < (most := kernel_rows(q, k, v, "causal")) < rows:
        found["divided_ms"] = round(1e3 * seconds(divided, turns), 4)
    return found


def product(bits: int, rows: int, small: bool) -> dict[str, Any]:
    """Time products of some rows with matrices of 4, 8 or 16 bits a weight."""
    inner, outer = SMALL_PRODUCT if small else PRODUCT
    count, turns = (1, 1) if small else (MATRICES, TURNS)
    dtype = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16
    x = mx.random.normal((rows, inner), key=mx.random.key(0)).astype(dtype)
    if bits == 16:
        plain = [mx.full((outer, inner), n + 1, dtype=dtype) for n in range(count)]
        mx.eval(plain)
        taken = seconds(lambda: mx.stack([x @ one.T for one in plain]), turns)
    else:
        words = [mx.full((outer, inner * bits // 32), n + 1, mx.uint32) for n in range(count)]
        scales = mx.full((outer, inner // 64), 0.01, dtype)
        mx.eval(words, scales)
        taken = seconds(
            lambda: mx.stack(
                [mx.quantized_matmul(x, one, scales, scales, bits=bits) for one in words]
            ),
            turns,
        )
    return {"ms": round(1e3 * taken, 4)}


def cells(small: bool) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Yield the description of each cell and the function that measures it, products first."""
    rows = (1, 2, 4, 8, 9) if small else ROWS
    for bits in (4, 8, 16):
        for m in rows:
            yield (
                {"kind": "product", "bits": bits, "rows": m},
                lambda bits=bits, m=m: product(bits, m, small),
            )
    for keys in CONTEXTS[:2] if small else CONTEXTS:
        for shape in HEADS[:1] if small else HEADS:
            for m in rows:
                where = dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
                yield (
                    {"kind": "attention", **where, "keys": keys, "rows": m},
                    lambda shape=shape, keys=keys, m=m: attention(
                        *shape, keys, m, 1 if small else TURNS
                    ),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="no cell begins later")
    parser.add_argument("--small", action="store_true", help="few cells, for a machine without GPU")
    given = parser.parse_args()
    deadline, found, left = time.monotonic() + given.seconds, [], 0
    single: dict[tuple[Any, ...], float] = {}
    for cell, measure in cells(given.small):
        if time.monotonic() > deadline:
            left += 1
            continue
        result = measure()
        alone = single.setdefault(tuple(v for k, v in cell.items() if k != "rows"), result["ms"])
        found.append({**cell, **result, "of_one_row": round(result["ms"] / alone, 3)})
        mx.clear_cache()
    device = {name: str(value) for name, value in mx.device_info().items()}
    print(json.dumps({"device": device, "cells": found, "cells_left_out": left}))


if __name__ == "__main__":
    main()
