"""`python -m mlx_specdec` is the console script."""

from __future__ import annotations

import subprocess
import sys

from mlx_specdec import __version__


def test_the_package_runs_as_the_command_does() -> None:
    asked = [sys.executable, "-m", "mlx_specdec", "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and __version__ in done.stdout
