"""The wired limit: how many bytes of MLX's memory macOS must keep in RAM.

The limit is the size of the evaluated weights of large models. Macs have frozen and restarted with
a limit that also held caches and working space. Versions of macOS need no check: before macOS 15,
MLX accepts a limit and wires nothing."""

import atexit
import os

import mlx.core as mx

SWITCH = "MLX_SPECDEC_WIRED"
"""Environment variable: with 0, nothing is wired."""
SHARE = 0.25
"""Weights are wired if they take more than this share of the machine's memory. Smaller models are
hardly ever swapped out."""

_earlier: list[int] = []
"""The limit in bytes that `release` restores; empty if `wire` has set none."""


def wire() -> None:
    """Raise the wired limit to the bytes that MLX has evaluated, if they are many. The device's
    recommended limit is never exceeded. Call it right after weights were evaluated, when caches do
    not exist yet. A later call covers later models as well."""
    if os.environ.get(SWITCH) == "0" or not mx.metal.is_available():
        return
    device, evaluated = mx.device_info(mx.gpu), mx.get_active_memory()
    if evaluated <= SHARE * int(device["memory_size"]):
        return
    limit = min(int(device["max_recommended_working_set_size"]), evaluated)
    earlier = mx.set_wired_limit(limit)
    if not _earlier:
        _earlier.append(earlier)
        atexit.register(release)


def release() -> None:
    """Restore the wired limit from before the first call of `wire`."""
    if _earlier:
        mx.set_wired_limit(_earlier.pop())
        atexit.unregister(release)
