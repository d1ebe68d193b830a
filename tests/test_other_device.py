"""The tests' own switches to another device, in processes that the tests start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .support.shipped import ROOT

SITE = Path(__file__).parent / "support" / "site"
CORE = """
cpu = "the CPU"

def set_default_device(device):
    print("computes on", device)
"""
AS_GPU = """
import sys
assert "mlx.core" not in sys.modules and "mlx_specdec" not in sys.modules
from mlx_specdec.models import cpu_layers, number_format
print(number_format.on_cpu(), cpu_layers.on_cpu())
"""


def printed(script: str, *places: Path, **environment: str) -> str:
    """Return what a new Python prints that finds modules in these places."""
    path = os.pathsep.join(map(str, (SITE, *places)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("wanted", "message"), [("cpu", "computes on the CPU"), ("", "")])
def test_mlx_computes_on_the_cpu_from_its_import_on(
    wanted: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text(CORE)
    assert printed("import mlx.core", tmp_path, MLX_SPECDEC_TEST_DEVICE=wanted) == message


def test_no_module_of_the_package_takes_branches_for_cpus() -> None:
    assert printed(AS_GPU, ROOT, MLX_SPECDEC_TEST_AS_GPU="1") == "False False"
