"""`mlx-specdec`: the commands under one name.

Knows which commands there are. MLX is imported inside them, once the flags are known to be right,
so that --help and wrong flags answer at once.
"""

from __future__ import annotations

import typer

from .bench import bench
from .calibrate import calibrate
from .convert import convert
from .estimate import estimate
from .generate import generate
from .inspect import inspect
from .process import Version, exit_with, run_one
from .train_draft import train_draft
from .train_medusa import train_medusa

__all__ = [
    "app",
    "bench",
    "calibrate",
    "convert",
    "estimate",
    "generate",
    "inspect",
    "main",
    "run_one",
    "train_draft",
    "train_medusa",
]

app = typer.Typer(
    help="Speculative decoding on Apple's MLX: the target model's own text, faster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _front(version: Version = False) -> None:
    pass


app.command()(generate)
app.command()(convert)
app.command()(inspect)
app.command()(calibrate)
app.command()(bench)
app.command()(estimate)
app.command()(train_medusa)
app.command()(train_draft)


def main() -> None:
    """The console script."""
    exit_with(app, None)
