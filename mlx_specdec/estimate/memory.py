"""How many bytes models may take on this machine. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from ..checkpoints.disk import sizes

USABLE = 0.9
"""Of a machine's memory: the rest is the system's, and the working space of passes."""
CONTROL_GROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def limit() -> int:
    """Bytes that models may take on MLX's default device: what Metal recommends, else a share of
    the accelerator's memory or of the machine's."""
    info: Mapping[str, str | int] = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    own = info.get("total_memory") or info.get("memory_size")
    total = int(own) if own and mx.default_device() != mx.Device(mx.cpu) else physical()
    return int(USABLE * total)


def physical(groups: tuple[Path, ...] = CONTROL_GROUPS) -> int:
    """Bytes of the machine's memory, or of this process's share where it has a smaller one.

    groups: files with the limit of a control group, of which those that exist count.
    """
    limits = [text for file in groups if (text := _read(file)).isdigit()]
    return min([sizes.memory(), *map(int, limits)])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
