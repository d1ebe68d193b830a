"""README.md: its links lead somewhere, and its commands and its Python run."""

from __future__ import annotations

import re

import pytest

from mlx_specdec.cli.app import COMMANDS

from .support.shipped import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_its_links_lead_to_files() -> None:
    assert TEXT.count("\n") <= 130
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert len(links) > 10 and [link for link in links if not (ROOT / link).exists()] == []


def test_its_commands_exist() -> None:
    names = {command.__name__.replace("_", "-") for command in COMMANDS}
    named = set(re.findall(r"`mlx-specdec ([a-z][a-z-]*)", TEXT))
    assert named and named <= names


def test_its_python_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(TEXT.split("```python\n")[1].split("```")[0], {})
    assert len(capsys.readouterr().out) > 3
