"""What the program did before it was rebuilt inside, it does still."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .recorded_runs import GROUPS, SHIPPED, differences
from .support import ROOT

# The texts were recorded in float32, with the random numbers of the CPU.
pytestmark = pytest.mark.cpu_only
QUICK = ("py-llama batches",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GROUPS if name not in SHIPPED])
def test_runs_are_as_recorded(name: str, tmp_path: Path) -> None:
    assert differences(name, tmp_path) == {}


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([name for name in SHIPPED if name not in QUICK], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_runs_of_shipped_models_are_as_recorded(names: list[str]) -> None:
    """In a process that loads the fast BLAS, since it imports the package before MLX."""
    script = "import sys, mlx_specdec; from tests.contract.recorded_runs import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; sys.exit(main(sys.argv[1:]))", *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stdout + done.stderr
