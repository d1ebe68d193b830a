"""The wired limit: the number of bytes of MLX's memory that macOS must keep in RAM.

After a large model is loaded, the limit is set to MLX's active memory, which is mostly weights. It
includes caches that exist at that time, such as the caches of a model that was loaded earlier. It
leaves nothing for caches and working memory that are allocated later: Macs have frozen and
restarted with a limit that included them. The version of macOS is not checked, because MLX accepts
a limit before macOS 15, and wires nothing."""

import atexit
import os

import mlx.core as mx

WIRED_SWITCH = "MLX_SPECDEC_WIRED"
"""Environment variable that keeps the limit unchanged if its value is 0."""
ACTIVE_SHARE = 0.25
"""The limit is set if the active memory exceeds this share of the machine's memory. macOS hardly
ever swaps smaller models out."""

_earlier: list[int] = []
"""The limit in bytes that `release` restores; empty if `wire` has set none."""


def wire() -> None:
    """Set the wired limit to MLX's active memory, if this exceeds ACTIVE_SHARE of the
    machine's memory. The limit never exceeds the one that the device recommends. Call this right
    after the weights of a model are evaluated, and again after another model."""
    if os.environ.get(WIRED_SWITCH) == "0" or not mx.metal.is_available():
        return
    device, active = mx.device_info(mx.gpu), mx.get_active_memory()
    if active <= ACTIVE_SHARE * int(device["memory_size"]):
        return
    limit = min(int(device["max_recommended_working_set_size"]), active)
    earlier = mx.set_wired_limit(limit)
    if not _earlier:
        _earlier.append(earlier)
        atexit.register(release)


def release() -> None:
    """Restore the wired limit that was set before the first call of `wire`."""
    if _earlier:
        mx.set_wired_limit(_earlier.pop())
        atexit.unregister(release)
