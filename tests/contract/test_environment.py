"""docs/environment.md has the environment variables of the program, and no others."""

import re
from pathlib import Path

from .support import ROOT

OWN = re.compile(r"(?<!_)MLX_SPECDEC_[A-Z_]*[A-Z]")
INNER = {"MLX_SPECDEC_ROOT", "MLX_SPECDEC_STATUS"}
"""Variables with which a test, or the launch command, tells another process something."""


def named(*directories: str) -> set[str]:
    """Return the variables that the files below some directories name."""
    files = [file for name in directories for file in (ROOT / name).rglob("*") if file.is_file()]
    texts = (file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".sh"))
    return {name for text in texts for name in OWN.findall(text)}


def on_page() -> set[str]:
    """Return the variables that begin a row of a table on the page."""
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_page_has_every_variable_of_the_program_and_no_other() -> None:
    own = {name for name in on_page() if name.startswith("MLX_SPECDEC_")}
    assert own == named("mlx_specdec", "scripts", "tests") - INNER


def test_the_page_has_the_variables_of_others_that_the_program_reads_itself() -> None:
    read = re.compile(r"""environ(?:\.get|\.setdefault)?[(\[]"([A-Z][A-Z0-9_]+)""")
    files: list[Path] = [*(ROOT / "mlx_specdec").rglob("*.py")]
    found = {name for file in files for name in read.findall(file.read_text(encoding="utf-8"))}
    silent = {"TRANSFORMERS_NO_ADVISORY_WARNINGS", "HF_HUB_VERBOSITY"}
    assert "NO_COLOR" in found and found - silent <= on_page()
