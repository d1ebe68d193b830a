"""The process: which BLAS multiplies, TF32, threads, and the command that installs an extra."""

import _ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from .support import ROOT, Outcome, checkpoint

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux replaces the BLAS"
)
LATE = "RuntimeWarning: MLX was imported before mlx_specdec"
LOADS = "import sys; from mlx_specdec import Options, generate, load; pair = load(sys.argv[1])\n"
BLAS = "print(generate(pair, [5, 6], Options(max_tokens=1)).stats.blas)"


def python(script: str, *words: object, **environment: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@on_linux
@pytest.mark.parametrize("library", ["none", _ctypes.__file__], ids=["none", "library"])
def test_a_library_is_chosen_before_mlx_is_imported_and_named(llama: Path, library: str) -> None:
    # A package that was imported before MLX is in time, and does not import MLX itself.
    first = "import mlx_specdec, sys; assert 'mlx.core' not in sys.modules\nimport mlx.core\n"
    done = python(first + LOADS + BLAS, llama, MLX_SPECDEC_BLAS=library)
    assert (done.code, done.err) == (0, "")
    assert done.out.strip() == ("bundled" if library == "none" else Path(library).stem)


@on_linux
def test_a_path_that_is_no_library_is_refused_by_name(tmp_path: Path) -> None:
    fake = tmp_path / "libfast.so"
    fake.write_text("no library")
    script = "import runpy; runpy.run_module('mlx_specdec', run_name='__main__')"
    done = python(script, "generate", "hi", MLX_SPECDEC_BLAS=str(fake))
    done.refuses("MLX_SPECDEC_BLAS names a library", "libfast.so")


def installed(directory: Path, *, mkl: bool) -> str:
    """Return a PYTHONPATH on which the package mkl is installed, or is not."""
    script = directory / "sitecustomize.py"
    files = "[Found()]" if mkl else "None"
    script.write_text(
        "from importlib import metadata\n"
        "import ctypes.util\n"
        "class Found:\n"
        "    name = 'libmkl_rt.so.2'\n"
        "    locate = lambda self: '/no/such/libmkl_rt.so.2'\n"
        "plain = metadata.files\n"
        f"metadata.files = lambda name: {files} if name == 'mkl' else plain(name)\n"
        "ctypes.util.find_library = lambda name: None\n"
    )
    return f"{directory}:{ROOT}"


@on_linux
@pytest.mark.parametrize(
    ("mkl", "count"),
    [(True, 1), (False, 0)],  # 0 if there is nothing that could have been loaded
)
def test_an_mlx_that_came_first_is_said_once_if_it_is_slow(
    llama: Path, tmp_path: Path, mkl: bool, count: int
) -> None:
    script = f"import mlx.core\n{LOADS}load(sys.argv[1])"
    done = python(script, llama, PYTHONPATH=installed(tmp_path, mkl=mkl))
    assert (done.code, done.err.count(LATE)) == (0, count), done


@pytest.mark.parametrize("module", ["mlx_specdec", "main", "convert"])
@pytest.mark.parametrize(("chosen", "used"), [({}, "0"), ({"MLX_ENABLE_TF32": "1"}, "1")])
def test_tf32_is_off_before_mlx_is_imported_unless_the_user_wants_it(
    module: str, chosen: dict[str, str], used: str
) -> None:
    facts = "os.environ['MLX_ENABLE_TF32'], 'mlx.core' in sys.modules"
    done = python(f"import os, sys, {module}; print({facts})", **chosen)
    assert done.out.split() == [used, "False"], done


# A thread that loads and generates leaves nothing of MLX's that ends the process badly.


ENDS = """
import sys, threading
from mlx_specdec import Options, generate, load

def work():
    pair = load(sys.argv[1], sys.argv[2])
    print(*generate(pair, "def f(x):", Options(max_tokens=5)).tokens)

for _ in range(6):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def test_a_process_ends_well_whose_threads_have_generated(llama: Path, tmp_path: Path) -> None:
    ended = python(ENDS, llama, checkpoint(tmp_path, seed=1), MLX_SPECDEC_CACHE=str(tmp_path / "c"))
    assert (ended.code, ended.err) == (0, "")
    assert len(set(ended.out.splitlines())) == 1
