"""The machine and the process. This module finds the BLAS that MLX uses, measures memory and disk,
writes sizes as text, and keeps Python's environment, limits and cache directory.

MLX's CPU wheel for Linux contains the reference BLAS, whose matrix products read all weights once
for each row. MKL (from the PyPI package `mkl`, extra `fast-cpu`) or the system's OpenBLAS replaces
it if that library is loaded before MLX, with global symbols."""

import contextlib
import ctypes
import gc
import json
import os
import platform
import re
import resource
import secrets
import shlex
import shutil
import sys
import threading
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes.util import find_library
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

from rich.filesize import decimal

from .errors import OptionError, OutputError, PromptError, SpecdecError

BLAS_VARIABLE = "MLX_SPECDEC_BLAS"
OPENBLAS = ("libopenblas.so.0", "libopenblas.so")

_loaded: list[tuple[str, ctypes.CDLL]] = []
_warned: list[bool] = []


def load_blas() -> None:
    """Load a BLAS if MLX is not imported yet. Later calls change nothing.

    The environment variable MLX_SPECDEC_BLAS is "auto" for MKL, OpenBLAS or MLX's own BLAS, in this
    order, which is the default; "none"; or the path of a library. Raises OptionError if this
    library cannot be loaded."""
    wanted = os.environ.get(BLAS_VARIABLE) or "auto"
    if wanted == "none" or "mlx.core" in sys.modules or not blas_is_slow():
        return
    libraries = [*(("mkl", path) for path in _mkl()), *(("openblas", name) for name in OPENBLAS)]
    if wanted != "auto":
        libraries = [(Path(wanted).stem.removeprefix("lib"), wanted)]
    for label, path in libraries:
        try:
            _loaded.append((label, ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)))
        except OSError as problem:
            if wanted != "auto":
                raise OptionError(
                    f"{BLAS_VARIABLE} names a library that cannot be loaded: {problem}"
                ) from None
        else:
            # MKL's idle threads spin. Leave one core free for the thread that builds the graph.
            _use_cores(-1)
            return


def blas_name() -> str:
    """Return the name of the CPU's BLAS: mkl, openblas, accelerate, bundled, or a file's name."""
    if _loaded:
        return _loaded[0][0]
    return "accelerate" if sys.platform == "darwin" else "bundled"


def device_name() -> str:
    """Return "cpu" if MLX computes on the CPU, otherwise the accelerator's name."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))


def blas_is_slow() -> bool:
    """Return whether MLX multiplies with its slow BLAS although this platform has faster ones."""
    replaceable = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
    return replaceable and not _loaded


def warn_if_late() -> None:
    """Warn once, with a RuntimeWarning, if a faster BLAS is installed but MLX was imported before
    `load_blas` could replace the reference BLAS."""
    wanted = os.environ.get(BLAS_VARIABLE) or "auto"
    if wanted == "none" or _warned or not blas_is_slow() or device_name() != "cpu":
        return
    if wanted != "auto" or _mkl() or find_library("openblas"):
        _warned.append(True)
        warnings.warn(
            "MLX was imported before mlx_specdec and multiplies with its slow BLAS, several times "
            "slower than the installed one: import mlx_specdec first",
            RuntimeWarning,
            stacklevel=3,
        )


def _mkl() -> list[str]:
    """Return the paths of MKL's library in the PyPI package `mkl`."""
    files: Sequence[metadata.PackagePath] = ()
    with contextlib.suppress(metadata.PackageNotFoundError):
        files = metadata.files("mkl") or ()
    return [str(file.locate()) for file in files if file.name.startswith("libmkl_rt.so")]


def _use_cores(more: int) -> None:
    """Let MKL use as many threads as there are cores, and `more`. Other libraries decide alone, and
    so does the user with MKL_NUM_THREADS."""
    for label, library in _loaded:
        if label == "mkl" and "MKL_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0))
            library.MKL_Set_Num_Threads(ctypes.c_int(max(1, cores + more)))


@contextlib.contextmanager
def all_cores(wanted: bool) -> Iterator[None]:
    """Let the BLAS use all cores, if that is wanted, in a block that submits little and then waits,
    such as a prefill."""
    _use_cores(0 if wanted else -1)
    try:
        yield
    finally:
        _use_cores(-1)


def install(extra: str) -> str:
    """Return the command that installs what an extra of this package needs for this Python."""
    stated: Sequence[str] = ()
    with contextlib.suppress(metadata.PackageNotFoundError):
        stated = metadata.requires("mlx-specdec") or ()
    of_extra = re.compile(rf"""\bextra == ["']{extra}["']""")
    needed = shlex.join(one.partition(";")[0].strip() for one in stated if of_extra.search(one))
    if not needed:
        return "./scripts/setup.sh"  # a clone whose installation is old or missing
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return f"pipx inject mlx-specdec {needed}"
    python = shlex.quote(sys.executable)
    if find_spec("pip") is None:
        return f"uv pip install --python {python} {needed}"
    return f"{python} -m pip install {needed}"


@contextlib.contextmanager
def open_files_kept() -> Iterator[None]:
    """Keep the limits of open files in a block that may import mlx_lm.utils. That
    module sets them to 2,048 and 4,096, which fails if the hard limit is lower, and takes open
    files from a server."""
    change = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = change


def allow_files(most: int) -> int:
    """Raise the limit of open files to `most`, as far as the hard limit allows, and return it, or
    `most` if there is none. The default is 256 on macOS and 1,024 under systemd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    most = max(soft, most if hard == resource.RLIM_INFINITY else min(most, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def hints(table: str) -> dict[str, str]:
    """Return a table of hints.toml: what to do instead of each thing that was removed, or that only
    other programs have."""
    text = Path(__file__).with_name("hints.toml").read_text(encoding="utf-8")
    entries: dict[str, str] = tomllib.loads(text)[table]
    return {name: hint for names, hint in entries.items() for name in names.split(", ")}


CACHE_VARIABLE = "MLX_SPECDEC_CACHE"
"""Environment variable that names a directory to use instead of the platform's cache directory."""


def cache_directory(kind: str) -> Path:
    """Return the cache directory for one kind of files. The directory may not exist yet."""
    if place := os.environ.get(CACHE_VARIABLE):
        return Path(place) / kind
    from platformdirs import user_cache_path

    return user_cache_path("mlx-specdec") / kind


@contextlib.contextmanager
def replacing(file: Path, *, make_parents: bool = True) -> Iterator[BinaryIO]:
    """Replace a file atomically by what the block writes to the stream. If the block fails, the
    file stays as it was. Raises OSError."""
    if make_parents:
        file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.parent / f".{secrets.token_hex(4)}.partial"
    try:
        with partial.open("xb") as stream:
            yield stream
        partial.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def release_memory() -> None:
    """Return memory that has been freed to the system: MLX's cache, and with glibc the pages that
    malloc keeps for the thread that allocated them."""
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no such function
            ctypes.CDLL(None).malloc_trim(0)


class _End:
    """An object in a thread's local storage, which clears MLX's streams when the thread ends."""

    def __del__(self) -> None:
        import mlx.core as mx

        mx.clear_streams()


_storage = threading.local()


def clear_at_end() -> None:
    """Clear MLX's streams of this thread when the thread ends. Further calls do nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not hasattr(_storage, "end"):
        _storage.end = _End()


SHARD_BYTES = 4_000_000_000
"""Largest default size of a result's shard, in bytes."""
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


def free_disk(place: Path) -> int:
    """Return the free bytes of the disk that holds `place`, which need not exist."""
    there = next(path for path in (place, *place.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def check_room(
    place: Path, nbytes: int, what: str, error: type[SpecdecError], instead: str = ""
) -> None:
    """Raise an error if the disk that holds `place` has less than `nbytes` free. what, instead: The
    beginning and the end of the error."""
    if nbytes > (free := free_disk(place)):
        sizes = f"{show_size(nbytes)}, and its disk has {show_size(free)} free"
        raise error(f"{what} needs {sizes}: make room{instead}")


def default_shard_bytes() -> int:
    """Return 4 GB, or a quarter of the machine's memory if that is less."""
    return max(1, min(SHARD_BYTES, memory() // 4))


def parse_size(flag: str, text: str, *, kilo: int = 1000, zero: bool = False) -> int:
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


def read_text(file: Path, error: type[SpecdecError], where: str = "", what: str = "") -> str:
    """Return the text of a file that a user names, without a byte order mark. Raises `error` if the
    file cannot be read or is not UTF-8 text. where: The beginning of the error, such as a flag.
    what: The contents for the error, such as "the data from "."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise error(f"{where}cannot read {what}{file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise error(f"{where}{file} is not UTF-8 text") from None


def read_lines(file: Path, limit: int | None = None) -> list[tuple[str, str | dict[str, Any]]]:
    """Read the first `limit` lines of a file that are not blank. The lines are JSON objects if the
    first line is one. Otherwise they are texts, in which `\\n` means a line break.

    Returns:
        The lines, each after its name for errors.
    Raises:
        PromptError: If the file cannot be read.
    """
    text = read_text(file, PromptError, what="the data from ")
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
        reason = "nested too deeply, or a number with too many digits"
        if isinstance(problem, json.JSONDecodeError):
            reason = problem.msg
        raise PromptError(f"{where} is not JSON ({reason}): each line must be an object") from None
    if not isinstance(entry, dict):
        raise PromptError(f'{where} must be an object with "prompt"')
    return entry


def check_not_read(
    flag: str, outputs: Iterable[str | Path | int], inputs: Iterable[str | Path | None]
) -> None:
    """Raise OutputError if a file or directory is to be read and written. Links and other spellings
    of the same file count.

    Args:
        flag: The flag or argument that names the output, for the error.
        outputs: Paths, or numbers of open files.
        inputs: Paths. Names that are no path, and None, are ignored."""
    sources = [source for source in inputs if source is not None]
    for output, source in product(outputs, sources):
        with contextlib.suppress(OSError, ValueError):  # one of them does not exist
            if os.path.samestat(os.stat(output), os.stat(source)):
                raise OutputError(f"{source} is read and cannot be overwritten: change {flag}")


show_size = decimal
"""Formats a size with the largest suitable unit: "45.3 GB"."""
