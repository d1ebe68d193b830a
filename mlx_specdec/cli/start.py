"""The entry point of the command line. It runs with Python 3.8 and without dependencies, so that it
can report what is missing."""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
START_PACKAGES = ("typer", "mlx")
INTERRUPTED = 130


def main(command: str = "") -> None:
    """Run `mlx-specdec`, or only one of its commands."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the imports are done, exit at once: an interrupted import would print a traceback.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _find_environment()
    from . import app, interrupts

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.watch()
    app.main(getattr(app, command, None))


def _find_environment() -> None:
    """Restart in the virtual environment of the clone if this Python is too old or lacks packages.
    Exit with an error if there is no such environment."""
    lacking = [name for name in START_PACKAGES if find_spec(name) is None]
    if sys.version_info >= (3, 11) and not lacking:
        return
    environment = CLONE / ".venv"
    python = environment / "bin" / "python"
    if python.exists() and not environment.samefile(sys.prefix):
        # sys.orig_argv includes Python's own arguments, such as -m.
        arguments = getattr(sys, "orig_argv", [None, *sys.argv])[1:]
        os.execv(str(python), [str(python), *arguments])
    what = "is older than 3.11" if not lacking else "has no " + " and no ".join(lacking)
    print(f"error: {sys.executable} {what}: run ./scripts/setup.sh first", file=sys.stderr)
    sys.exit(2)
