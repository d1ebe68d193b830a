"""Draws the speed of a benchmark's methods over their draft lengths, with matplotlib."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from .. import system
from ..errors import OptionError, OutputError
from .figures import Figures

SUFFIXES = (".png", ".svg")


def check(file: Path) -> None:
    """Raise OptionError if a plot cannot be drawn into this file."""
    if file.suffix not in SUFFIXES:
        raise OptionError(f"--plot must name a file that ends with .png or .svg, not {file.name}")
    if not file.absolute().parent.is_dir():
        raise OptionError(f"--plot: there is no directory {file.parent}")
    try:
        import_module("matplotlib.figure")
    except ImportError:
        needed = system.install("plot")
        raise OptionError(
            f"--plot needs matplotlib, the extra mlx-specdec[plot]: {needed}"
        ) from None


def draw(methods: Sequence[Figures], title: str, file: Path) -> None:
    """Write the plot. Bars span the repeats. Raises OutputError if the file cannot be written."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(7, 4.5), layout="constrained")
    axes = picture.subplots()
    axes.axhline(1.0, color="gray", linewidth=1)
    for family in dict.fromkeys(method.family for method in methods[1:]):
        points = [
            (int(one.num_draft), one.speed_up, one.spread)
            for one in methods
            if one.family == family and one.num_draft != "auto" and one.speed_up and one.spread
        ]
        if not points:
            continue
        lengths, speeds, spreads = zip(*sorted(points), strict=True)
        below = [max(0.0, speed - low) for speed, (low, _) in zip(speeds, spreads, strict=True)]
        above = [max(0.0, high - speed) for speed, (_, high) in zip(speeds, spreads, strict=True)]
        axes.errorbar(lengths, speeds, (below, above), marker="o", capsize=3, label=family)
    for one in methods:
        if one.num_draft == "auto" and one.speed_up:
            axes.axhline(one.speed_up, linestyle="--", linewidth=1, label=one.name, color="C7")
    axes.set(title=title, xlabel="draft length", ylabel="speed relative to plain decoding")
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    try:
        with system.replacing(file, make_parents=False) as stream:
            picture.savefig(stream, format=file.suffix[1:])
    except OSError as problem:
        raise OutputError(f"cannot write the plot to {file}: {problem.strerror}") from None
