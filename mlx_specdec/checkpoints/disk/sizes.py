"""Numbers of bytes: in words ("4GB", "500 MiB"), of memory, free on a disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import OptionError

SHARD_BYTES = 4_000_000_000
SHARE_OF_MEMORY = 0.25
"""A shard of the result is at most this part of the machine's memory, unless asked for."""
ASSUMED_MEMORY = 8 * 2**30
"""Where the system does not tell."""
CONTROL_GROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
USABLE = 0.9
"""Of a machine's memory: the rest is the system's, and the working space of passes."""
_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def memory(groups: Sequence[Path] = CONTROL_GROUPS) -> int:
    """Bytes of the machine's memory, or of this process's share where it has a smaller one.

    groups: files with the limit of a control group, of which those that exist count.
    """
    import mlx.core as mx

    if mx.metal.is_available():
        return int(mx.device_info()["memory_size"])
    limits = [file.read_text(encoding="ascii").strip() for file in groups if file.is_file()]
    return min([_physical(), *(int(limit) for limit in limits if limit.isdigit())])


def _physical() -> int:
    try:  # not SC_PAGE_SIZE, which some Pythons on macOS do not know
        return os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return ASSUMED_MEMORY


def usable_memory() -> int:
    """Bytes that models may take on MLX's default device: what Metal recommends, else a share of
    the accelerator's memory or of the machine's."""
    import mlx.core as mx

    info: Mapping[str, str | int] = mx.device_info()
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    own = info.get("total_memory") or info.get("memory_size")
    total = int(own) if own and mx.default_device() != mx.Device(mx.cpu) else memory()
    return int(USABLE * total)


def free(place: Path) -> int | None:
    """Bytes free on the disk where `place` is or would be; None where that cannot be told."""
    try:
        there = next(path for path in (place, *place.absolute().parents) if path.is_dir())
        return shutil.disk_usage(there).free
    except (OSError, StopIteration):
        return None  # whatever is wrong with it is told when it is written to


def default_shard_bytes() -> int:
    """4 GB, less on a small machine."""
    return max(1, min(SHARD_BYTES, int(SHARE_OF_MEMORY * memory())))


def parse(text: str) -> int:
    """Bytes that "4GB", "4g", "3.5GiB" or "1000" mean. Raises OptionError for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise OptionError(f"{text!r:.40} is no size: write 4GB, 500MB or 2GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _UNITS.index(match[2].upper()))


def show(nbytes: int) -> str:
    """In the largest unit that leaves a number above one: "45.3 GB"."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.1f} {unit}"
    return f"{nbytes} bytes"
