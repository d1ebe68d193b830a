"""Safe reading of untrusted files as JSON or memory maps; the machine's memory and disk space; and
sizes as text."""

import contextlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakSet

from rich.filesize import decimal

from ..errors import CheckpointError, OptionError, OutputError, PromptError, SourceError

_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
"""The beginning of a Git LFS pointer, and a size that no pointer reaches."""


def check_regular(file: Path) -> None:
    """Raise CheckpointError for a pipe, a socket, a device or a Git LFS pointer."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise CheckpointError(f"{file} is no regular file: put one there")
    with contextlib.suppress(OSError):
        if file.stat().st_size < _POINTER_BYTES and file.read_bytes().startswith(_POINTER):
            raise CheckpointError(f"{file} is a pointer of Git LFS: run `git lfs pull` there")


def check_directory(directory: Path) -> None:
    """Raise SourceError for a directory that this user may not read, or in Meta's own layout."""
    if not os.access(directory, os.R_OK | os.X_OK):
        raise SourceError(f"{directory} may not be read: give yourself the right to")
    if any(directory.glob("consolidated.*.pth")) and not (directory / "config.json").exists():
        raise SourceError(
            f"{directory} has Meta's own layout, which is not read any more: take the model in "
            "Hugging Face's format, which every Llama on the Hub has"
        )


def check_not_read(
    flag: str, outputs: Iterable[str | Path | int], inputs: Iterable[str | Path | None]
) -> None:
    """Raise OutputError if a file or directory is to be read and written. Links and other spellings
    of the same file count.

    Args:
        flag: What names the output, for the error.
        outputs: Paths, or numbers of open files.
        inputs: Paths. Names that are no path, and None, are ignored."""
    sources = [source for source in inputs if source is not None]
    for output, source in product(outputs, sources):
        with contextlib.suppress(OSError, ValueError):  # one of them does not exist
            if os.path.samestat(os.stat(output), os.stat(source)):
                raise OutputError(f"{source} is read and cannot be overwritten: change {flag}")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise CheckpointError if `check_regular` does, or if the block raises OSError."""
    check_regular(file)
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if the file cannot be read or is no object."""
    try:
        with reading(file):
            value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON: download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    return value


def read_lines(
    file: Path, what: str, limit: int | None = None
) -> list[tuple[str, str | dict[str, Any]]]:
    """Read the first `limit` lines of a file that are not blank. The lines are JSON objects if the
    first line is one. Otherwise they are texts, in which `\\n` means a line break.

    Args:
        what: A noun for the contents, for errors.
    Returns:
        The lines, each after its name for errors.
    Raises:
        PromptError: If the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise PromptError(f"cannot read the {what} from {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"{file} is not UTF-8 text: {what} must be") from None
    # splitlines() would also cut at U+2028 and form feeds, which prompts may contain.
    numbered = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    lines = [(f"line {at} of {file}", line) for at, line in numbered[:limit]]
    if lines and lines[0][1].lstrip().startswith("{"):
        return [(where, json_object(line, where)) for where, line in lines]
    return [(where, line.rstrip("\r").replace("\\n", "\n")) for where, line in lines]


def json_object(line: str, where: str) -> dict[str, Any]:
    """Parse the JSON object on a line. where: The line's name for errors. Raises PromptError."""
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as problem:
        reason = getattr(problem, "msg", "nested too deeply, or a number with too many digits")
        raise PromptError(f"{where} is not JSON ({reason}): each line must be an object") from None
    if not isinstance(entry, dict):
        raise PromptError(f'{where} must be an object with "prompt"')
    return entry


def open_map(file: Path) -> mmap.mmap:
    """Map a file for reading. Raises CheckpointError, also for an empty file."""
    try:
        with reading(file), file.open("rb") as stream:
            opened = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{file} is empty: download it again") from None
    _maps.add(opened)
    return opened


_maps: WeakSet[mmap.mmap] = WeakSet()


def drop_pages() -> None:
    """Release pages that were read through maps, because they count as memory of the process."""
    for opened in [*_maps] if hasattr(mmap, "MADV_DONTNEED") else ():
        if not opened.closed:
            opened.madvise(mmap.MADV_DONTNEED)


SHARD_BYTES = 4_000_000_000
SHARD_SHARE_OF_MEMORY = 0.25
"""Largest default size of a result's shard: in bytes, and as a share of the machine's memory."""
CONTROL_GROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
USABLE = 0.9
"""Share of the memory that models may use. The system and temporary arrays need the rest."""
_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE)
_SURELY_BYTES = 10**6
"""The smallest number without a unit that means bytes. Whoever writes less than a megabyte has
forgotten the unit."""


def memory() -> int:
    """Return the bytes of memory of the machine, or the smaller limit of the control group."""
    import mlx.core as mx

    if mx.metal.is_available():
        # The default device may be the CPU, for which MLX does not report the size.
        return int(mx.device_info(mx.gpu)["memory_size"])
    limits = [file.read_text().strip() for file in CONTROL_GROUPS if file.is_file()]
    # Some Pythons on macOS lack SC_PAGE_SIZE.
    physical = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def usable_memory() -> int:
    """Return the bytes that models may use on MLX's default device."""
    import mlx.core as mx

    info: Mapping[str, str | int] = mx.device_info(mx.gpu)
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    reported = info.get("total_memory") or info.get("memory_size")
    total = int(reported) if reported and mx.default_device() != mx.Device(mx.cpu) else memory()
    return int(USABLE * total)


def free(place: Path) -> int:
    """Return the free bytes of the disk that holds `place`, which need not exist."""
    there = next(path for path in (place, *place.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def default_shard_bytes() -> int:
    """Return 4 GB, or less on a machine with little memory."""
    return max(1, min(SHARD_BYTES, int(SHARD_SHARE_OF_MEMORY * memory())))


def parse(flag: str, text: str, *, kilo: int = 1000, zero: bool = False) -> int:
    """Parse the size that a flag takes, such as "4GB", "4g", "3.5GiB", "9B" or "0".

    Args:
        flag: The name of the flag, for the error.
        kilo: The number of bytes in a KB; it is 1024 where Apple counts.
        zero: Whether 0 is a size for this flag.
    Returns:
        The size in bytes.
    Raises:
        OptionError: If the text is no size, or a small number without a unit, or 0."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise OptionError(f"{flag}: {text!r:.40} is no size: write 4GB, 500MB or 2GiB")
    number = float(match[1])
    if not (match[2] or match[4]) and 0 < number < _SURELY_BYTES:
        raise OptionError(f"{flag}: {match[1]} bytes? write {match[1]}GB")
    base = 1024 if match[3] else kilo
    nbytes = int(number * base ** _UNITS.index(match[2].upper()))
    if nbytes == 0 and not zero:
        raise OptionError(f"{flag} must be more than 0: give a size such as 8GB")
    return nbytes


show = decimal
"""Formats a size with the largest suitable unit: "45.3 GB"."""
