"""Files of other people, opened as JSON or as memory maps, and what fits on this machine: memory,
disk space, sizes in words."""

import contextlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ..errors import CheckpointError, OptionError, SourceError

DEEPEST = 50
"""JSON objects and lists in each other; those of real files have seven."""
_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
"""How a pointer of Git LFS begins, and more bytes than one has."""


def check_regular(file: Path) -> None:
    """Raises CheckpointError for a pipe, a socket, a device or a pointer of Git LFS."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise CheckpointError(f"{file} is no regular file: put one there")
    with contextlib.suppress(OSError):
        if file.stat().st_size < _POINTER_BYTES and file.read_bytes().startswith(_POINTER):
            raise CheckpointError(f"{file} is a pointer of Git LFS: run `git lfs pull` there")


def check_directory(directory: Path) -> None:
    """Raises SourceError for a directory whose files this user may not see."""
    if not os.access(directory, os.R_OK | os.X_OK):
        raise SourceError(f"{directory} may not be read: give yourself the right to")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raises CheckpointError as `check_regular`, and where the block raises OSError."""
    check_regular(file)
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError where it cannot be read or is no JSON object."""
    try:
        with reading(file):
            value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON: download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    if _is_deeper(value, DEEPEST):
        raise CheckpointError(f"{file} is refused: it nests more than {DEEPEST} objects and lists")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    # Whoever walks through such a value by recursion would overrun Python's stack.
    level = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for part in inner for each in part if isinstance(each, dict | list)]
    return bool(level)


def open_map(file: Path) -> mmap.mmap:
    """A read-only map of a whole file. Raises CheckpointError, also for an empty file."""
    try:
        with reading(file), file.open("rb") as stream:
            opened = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{file} is empty: download it again") from None
    _maps.add(opened)
    return opened


_maps: WeakSet[mmap.mmap] = WeakSet()


def drop_pages() -> None:
    """Release the pages that were read through maps, which count as memory of this process."""
    for each in [*_maps] if hasattr(mmap, "MADV_DONTNEED") else ():
        if not each.closed:
            each.madvise(mmap.MADV_DONTNEED)


SHARD_BYTES = 4_000_000_000
SHARE_OF_MEMORY = 0.25
"""A shard of a result is at most this part of the memory, unless the user names a size."""
CONTROL_GROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
USABLE = 0.9
"""Of a machine's memory: the rest is the system's, and the working space of passes."""
_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def memory() -> int:
    """Bytes of the machine's memory, or the limit of this process's control group if smaller."""
    import mlx.core as mx

    if mx.metal.is_available():
        # The default device may be the CPU, whose information lacks the size.
        return int(mx.device_info(mx.gpu)["memory_size"])
    limits = [file.read_text().strip() for file in CONTROL_GROUPS if file.is_file()]
    # Not SC_PAGE_SIZE, which some Pythons on macOS do not know.
    physical = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def usable_memory() -> int:
    """Bytes that models may take on MLX's default device."""
    import mlx.core as mx

    info: Mapping[str, str | int] = mx.device_info(mx.gpu)
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    own = info.get("total_memory") or info.get("memory_size")
    total = int(own) if own and mx.default_device() != mx.Device(mx.cpu) else memory()
    return int(USABLE * total)


def free(place: Path) -> int:
    """Bytes free on the disk where `place` is or would be."""
    there = next(path for path in (place, *place.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


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
    """Write a size in the largest unit that leaves a number above one: "45.3 GB"."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.1f} {unit}"
    return f"{nbytes} bytes"
