"""Settings of the process: the BLAS that MLX uses, the environment of Python, the limit of open
files, the cache directory, and cleanup of threads.

MLX's CPU wheel for Linux contains the reference BLAS, whose matrix products read all weights once
for each row. MKL (from the PyPI package `mkl`, extra `fast-cpu`) or the system's OpenBLAS replaces
it if that library is loaded before MLX, with global symbols."""

import contextlib
import ctypes
import gc
import os
import platform
import re
import resource
import shlex
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from .errors import OptionError

BLAS_VARIABLE = "MLX_SPECDEC_BLAS"
OPENBLAS = ("libopenblas.so.0", "libopenblas.so")

_loaded: list[tuple[str, ctypes.CDLL]] = []
_warned: list[bool] = []


def load(wanted: str | None = None) -> str:
    """Load a BLAS if MLX is not imported yet, and return `name()`. Later calls change nothing.

    Args:
        wanted: "auto" for MKL, OpenBLAS or MLX's own BLAS, in this order; "none"; or the path of a
            library. The default is the environment variable MLX_SPECDEC_BLAS, or else "auto".
    Raises:
        OptionError: If `wanted` is a path that cannot be loaded."""
    wanted = wanted or os.environ.get(BLAS_VARIABLE) or "auto"
    if wanted == "none" or _loaded or "mlx.core" in sys.modules or not _replaceable():
        return name()
    if wanted != "auto":
        try:
            _load(Path(wanted).stem.removeprefix("lib"), wanted)
        except OSError as problem:
            raise OptionError(
                f"{BLAS_VARIABLE} names a library that cannot be loaded: {problem}"
            ) from None
        return name()
    candidates = [("mkl", path) for path in _mkl()]
    for label, path in candidates + [("openblas", library) for library in OPENBLAS]:
        with contextlib.suppress(OSError):
            _load(label, path)
            break
    return name()


def name() -> str:
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


def is_slow() -> bool:
    """Return whether MLX multiplies with its slow BLAS although this platform has faster ones."""
    return not _loaded and _replaceable()


def warn_if_late() -> None:
    """Warn once, with a RuntimeWarning, if a faster BLAS is installed but MLX was imported before
    `load` could replace the reference BLAS."""
    wanted = os.environ.get(BLAS_VARIABLE) or "auto"
    if wanted == "none" or _warned or not is_slow() or device_name() != "cpu":
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


def _replaceable() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _load(label: str, path: str) -> None:
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    _loaded.append((label, library))
    if label == "mkl" and "MKL_NUM_THREADS" not in os.environ:
        # MKL's idle threads spin. Leave one core free for the thread that builds the graph.
        library.MKL_Set_Num_Threads(ctypes.c_int(max(1, len(os.sched_getaffinity(0)) - 1)))


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
    """Keep the limits of open files in a block that may import mlx_lm.utils. This module sets them
    to 2,048 and 4,096, which fails if the hard limit is lower, and lowers those of a server."""
    change = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = change


CACHE_VARIABLE = "MLX_SPECDEC_CACHE"
"""Environment variable that names a directory to use instead of the platform's cache directory."""


def directory(kind: str) -> Path:
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
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
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
