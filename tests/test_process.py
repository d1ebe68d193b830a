"""A faster BLAS is found, loaded before MLX and named; a wrong one is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_specdec import process

from .support.models import make_llama

ROOT = Path(__file__).resolve().parents[1]
linux_x86 = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux replaces the BLAS"
)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        check=False,
    )


def test_none_keeps_what_mlx_brings() -> None:
    done = run("from mlx_specdec.process import load; print(load())", MLX_SPECDEC_BLAS="none")
    assert done.stdout.strip() in ("bundled", "accelerate"), done.stderr


@linux_x86
def test_a_path_that_is_no_library_is_refused_by_name(tmp_path: Path) -> None:
    fake = tmp_path / "libfast.so"
    fake.write_text("no library")
    done = run(
        "from mlx_specdec import process as blas\n"
        "from mlx_specdec.errors import OptionError\n"
        "try:\n    blas.load()\nexcept OptionError as told:\n    print(told)",
        MLX_SPECDEC_BLAS=str(fake),
    )
    assert "libfast.so" in done.stdout and "MLX_SPECDEC_BLAS" in done.stdout, done.stderr


@linux_x86
@pytest.mark.parametrize("command", ["bench prompts/translation.jsonl --limit 1", "generate hi"])
def test_commands_load_it_before_they_import_mlx(command: str) -> None:
    words = ["mlx-specdec", *command.split(), "--max-tokens", "1"]
    script = f"import sys; sys.argv = {words}; from mlx_specdec.cli.start import main; main()"
    done = run(script, MLX_SPECDEC_BLAS="/no/such/libfast.so")
    assert done.returncode == 2 and "MLX_SPECDEC_BLAS names a library" in done.stderr


@linux_x86
def test_a_given_library_is_loaded_and_named() -> None:
    import _ctypes

    done = run(f"from mlx_specdec.process import load; print(load({_ctypes.__file__!r}), load())")
    label = Path(_ctypes.__file__).stem
    assert done.stdout.split() == [label, label], done.stderr


LATE = "MLX was imported before mlx_specdec"
LOADS = "from mlx_specdec import load\n" + "load('weights/t5-enfr')\n" * 2


def installed(directory: Path, *, mkl: bool) -> str:
    """Return a PYTHONPATH entry on which the package mkl is installed, or is not."""
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
    return f"{directory}:{Path(__file__).parents[1]}"


@linux_x86
@pytest.mark.parametrize(
    ("first", "mkl", "chosen", "count"),
    [
        ("import mlx.core", True, {}, 1),
        ("import mlx_lm", True, {}, 1),
        ("import mlx.core", False, {}, 0),  # there is nothing that could have been loaded
        ("import mlx.core", True, {"MLX_SPECDEC_BLAS": "none"}, 0),
    ],
)
def test_an_mlx_that_came_first_is_said_once_if_it_is_slow(
    tmp_path: Path, first: str, mkl: bool, chosen: dict[str, str], count: int
) -> None:
    script = f"import os; os.chdir({str(ROOT)!r})\n{first}\n{LOADS}"
    done = run(script, PYTHONPATH=installed(tmp_path, mkl=mkl), **chosen)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"RuntimeWarning: {LATE}") == count


@linux_x86
@pytest.mark.parametrize("first", ["import mlx_specdec", "from mlx_specdec import Options"])
def test_a_package_that_was_imported_before_mlx_is_in_time(first: str) -> None:
    import _ctypes

    script = (
        f"import os, sys; os.chdir({str(ROOT)!r})\n{first}\n"
        "assert not {'mlx.core', 'ctypes', 'mlx_specdec.process'} & set(sys.modules)\n"
        "count = len(sys.meta_path)\nimport mlx.core\n"
        f"{LOADS}from mlx_specdec.process import name\n"
        "print(name(), len(sys.meta_path) - count)"
    )
    done = run(script, MLX_SPECDEC_BLAS=_ctypes.__file__)
    assert done.returncode == 0 and LATE not in done.stderr, done.stderr
    assert done.stdout.split() == [Path(_ctypes.__file__).stem, "-1"]


@pytest.mark.parametrize("module", ["mlx_specdec", "mlx_specdec.process", "main", "convert"])
@pytest.mark.parametrize(("chosen", "used"), [({}, "0"), ({"MLX_ENABLE_TF32": "1"}, "1")])
def test_tf32_is_off_before_mlx_is_imported_unless_the_user_wants_it(
    module: str, chosen: dict[str, str], used: str
) -> None:
    facts = "os.environ['MLX_ENABLE_TF32'], 'mlx.core' in sys.modules"
    done = run(f"import os, sys, {module}; print({facts})", **chosen)
    assert done.stdout.split() == [used, "False"], done.stderr


# A thread that loads and generates leaves nothing of MLX's behind that ends the process badly.


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


@pytest.mark.slow
def test_a_process_ends_well_whose_threads_have_generated(tmp_path: Path) -> None:
    models = [str(make_llama(tmp_path / name, seed)) for seed, name in enumerate(("one", "other"))]
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, *models],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(set(ended.stdout.splitlines())) == 1


@pytest.mark.parametrize(
    ("marker", "has_pip", "command"),
    [
        ("", True, "PYTHON -m pip install"),
        ("pipx_metadata.json", True, "pipx inject mlx-specdec"),
        ("uv-receipt.toml", False, "uv pip install --python PYTHON"),
    ],
)
def test_the_command_that_installs_an_extra_suits_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str, has_pip: bool, command: str
) -> None:
    stated = [
        "mlx>=0.32",
        "uvicorn<0.60; extra == 'server'",
        "mkl; (linux) and extra == 'fast-cpu'",
    ]
    monkeypatch.setattr(process.metadata, "requires", lambda name: stated)
    monkeypatch.setattr(process, "find_spec", lambda name: has_pip or None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if marker:
        (tmp_path / marker).touch()
    command = command.replace("PYTHON", sys.executable)
    assert process.install("server") == f"{command} 'uvicorn<0.60'"
    assert process.install("fast-cpu") == f"{command} mkl"
    monkeypatch.setattr(process.metadata, "requires", lambda name: None)
    assert process.install("server") == "./scripts/setup.sh"
