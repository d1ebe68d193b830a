"""What the program did before it was rebuilt inside, it does still."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.shipped import python_path
from .runs import GROUPS, SHIPPED, differences

# The texts were recorded in float32, with the random numbers of the CPU.
pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]


@pytest.mark.parametrize("name", [name for name in GROUPS if name not in SHIPPED])
def test_runs_are_as_recorded(name: str, tmp_path: Path) -> None:
    assert differences(name, tmp_path) == {}


def test_runs_of_shipped_models_are_as_recorded() -> None:
    """In a process that loads the fast BLAS, since it imports the package before MLX."""
    script = "import sys, mlx_specdec; from tests.characterization.runs import compare"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; sys.exit(compare())"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stdout + done.stderr
