"""A faster BLAS is found, loaded before MLX and named; a wrong one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
def test_a_given_library_is_loaded_and_named() -> None:
    import _ctypes

    done = run(f"from mlx_specdec.process import load; print(load({_ctypes.__file__!r}), load())")
    label = Path(_ctypes.__file__).stem
    assert done.stdout.split() == [label, label], done.stderr


@linux_x86
def test_mkl_is_preferred_and_loading_goes_on_to_the_next_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlx_specdec import process as blas

    tried = []

    def refuse(label: str, path: str) -> None:
        tried.append(label)
        raise OSError(path)

    monkeypatch.setattr(blas, "_loaded", [])
    monkeypatch.setattr(blas, "_load", refuse)
    monkeypatch.setattr(blas, "_replaceable", lambda: True)
    monkeypatch.setattr(blas, "_mkl_paths", lambda: ["libmkl_rt.so.3"])
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("MLX_SPECDEC_BLAS", raising=False)
    assert blas.load() == "bundled"
    assert tried == ["mkl", "openblas", "openblas"]


def test_nothing_is_loaded_once_mlx_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_specdec import process as blas

    monkeypatch.setattr(blas, "_loaded", [])
    monkeypatch.setitem(sys.modules, "mlx.core", object())
    monkeypatch.setattr(blas, "_load", lambda label, path: pytest.fail("loaded too late"))
    assert blas.load() in ("bundled", "accelerate")
