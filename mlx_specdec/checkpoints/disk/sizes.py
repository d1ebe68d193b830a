"""Numbers of bytes: in words ("4GB", "500 MiB"), of memory, free on a disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ...errors import OptionError

SHARD_BYTES = 4_000_000_000
SHARE_OF_MEMORY = 0.25
"""A shard of the result is at most this part of the machine's memory, unless asked for."""
ASSUMED_MEMORY = 8 * 2**30
"""Where the system does not tell."""
_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def memory() -> int:
    """Bytes of memory that this machine has."""
    import mlx.core as mx

    if mx.metal.is_available():
        return int(mx.device_info()["memory_size"])
    try:  # not SC_PAGE_SIZE, which some Pythons on macOS do not know
        return os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return ASSUMED_MEMORY


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
