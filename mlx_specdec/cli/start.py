"""The way in: from a bare Python, from 3.8 on and without the dependencies, to the command line."""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("typer", "mlx")
INTERRUPTED = 130


def main(command: str = "") -> None:
    """Run `mlx-specdec`, or one command of it as a program of its own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An interrupted import has many ways to print a traceback.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _find_environment()
    from . import app, interrupts

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.watch()
    if command:
        app.run_one(getattr(app, command))
    else:
        app.main()


def _find_environment() -> None:
    """Go on in the virtual environment beside the program, where this Python lacks something."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if sys.version_info >= (3, 11) and not lacking:
        return
    environment = ROOT / ".venv"
    python = environment / "bin" / "python"
    if python.exists() and not environment.samefile(sys.prefix):
        # Those of Python itself included, as -m.
        arguments = getattr(sys, "orig_argv", [None, *sys.argv])[1:]
        os.execv(str(python), [str(python), *arguments])
    what = "is older than 3.11" if not lacking else "has no " + " and no ".join(lacking)
    print(f"error: {sys.executable} {what}: run ./scripts/setup.sh first", file=sys.stderr)
    sys.exit(2)
