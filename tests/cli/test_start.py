"""The way in: which Python runs, what Ctrl-C does before anything is imported, prompts by pipe."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_specdec.cli import generate as prompt
from mlx_specdec.cli import render
from mlx_specdec.cli.generate import read_prompt
from mlx_specdec.decoding.stop_criteria import Emission, Piece
from mlx_specdec.errors import PromptError

from ..support.commands import Run, Terminal

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b[31mred\x07\x9b5n\r\n\ttab \u202f!"


def shell(line: str, *, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which $P is this Python."""
    given = {**os.environ, "P": sys.executable, **environment}
    return subprocess.run(
        ["bash", "-c", line], env=given, cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The part of a clone that a Python without dependencies reads."""
    for name in ("main.py", "convert.py", "mlx_specdec/__init__.py", "mlx_specdec/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "mlx_specdec" / "cli").mkdir()
    for name in ("__init__.py", "start.py"):
        shutil.copy(ROOT / "mlx_specdec" / "cli" / name, tmp_path / "mlx_specdec" / "cli" / name)
    return tmp_path


@pytest.mark.parametrize("program", ["main.py", "convert.py", "-m mlx_specdec"])
def test_a_python_without_the_dependencies_says_what_to_run(clone: Path, program: str) -> None:
    done = shell(f"$P -S {program} x", cwd=clone, PYTHONPATH="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "no typer" in done.stderr and "./scripts/setup.sh" in done.stderr


@pytest.mark.parametrize("program", ["main.py", "convert.py", "-m mlx_specdec"])
def test_the_environment_beside_the_program_is_used(clone: Path, program: str) -> None:
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o755)
    done = shell(f"$P -S {program} 'a b' -m 3", cwd=clone, PYTHONPATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"-S|{program.replace(' ', '|')}|a b|-m|3|"


def test_ctrl_c_during_the_first_imports_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    done = shell("$P main.py x", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("$P main.py - <&-", "the prompt is empty"),
        ("$P main.py - </dev/null", "the prompt is empty"),
        ("$P main.py $'\\xff'", "not UTF-8"),
        ("$P main.py -p $'a\\xe9'", "not UTF-8"),
        ("printf '\\xff' | $P main.py", "not UTF-8"),
        ("printf '\\xff' | LC_ALL=C $P main.py -", "not UTF-8"),
        ("$P main.py --model /nowhere <&-", "no prompt"),
        ("$P main.py --model /nowhere </dev/null", "no prompt"),
        ("$P main.py --model /nowhere < <(true)", "no prompt"),
        ("echo | $P main.py --model /nowhere", "no prompt"),
    ],
)
def test_prompts_that_are_none_are_told_in_a_line(line: str, said: str) -> None:
    done = shell(line)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_pipe_and_a_file_are_prompts(run: Run, t5: Path) -> None:
    wanted = run("generate", "Les pates a midi", "--model", t5, "--quiet", "-m", 9).out
    asked = f"$P main.py --model {t5} --quiet -m 9"
    for line in (f"echo 'Les pates a midi' | {asked}", f"{asked} <<< 'Les pates a midi'"):
        assert shell(line).stdout == wanted


def test_an_argument_leaves_the_pipe_alone(run: Run, t5: Path) -> None:
    wanted = run("generate", "Les pates", "--model", t5, "--quiet", "-m", 9).out
    done = shell(f"echo other | ($P main.py 'Les pates' --model {t5} --quiet -m 9; cat)")
    assert done.stdout == wanted + "other\n"


def test_a_silent_pipe_that_stays_open_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompt, "PIPE_SECONDS", 0.01)
    out, into = os.pipe()
    with open(out, encoding="utf-8") as silent, open(into, "w", encoding="utf-8") as writer:
        monkeypatch.setattr(sys, "stdin", silent)
        assert read_prompt(None, None, None) is None
        assert "- waits for it" in capsys.readouterr().err
        writer.write("late")
        writer.close()
        assert read_prompt(None, None, None) == "late"


def test_a_terminal_is_not_read_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    with open(controller, "rb"), open(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_prompt(None, None, None) is None


def test_what_is_no_text_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    for given in (("\udcff", None, None), (None, "\udcff", None)):
        with pytest.raises(PromptError, match="not UTF-8"):
            read_prompt(*given)


def shown(stream: io.StringIO, **settings: bool) -> str:
    printer = render.TextPrinter(stream, **settings)
    printer.show(Emission((1, 2), (Piece(HOSTILE, False), Piece(HOSTILE, True))))
    printer.finish()
    return stream.getvalue()


def test_text_gives_the_terminal_no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    told = shown(Terminal())
    assert told == 2 * "\\x1b[31mred\\x07\\x9b5n\\r\n\ttab \u202f!" + "\n"
    marked = shown(Terminal(), show_drafts=True)
    assert marked.replace(render.GREEN_UNDERLINED, "").replace(render.PLAIN, "") == told


def test_a_pipe_gets_the_text_as_it_is() -> None:
    assert shown(io.StringIO()) == 2 * HOSTILE + "\n"


@pytest.mark.parametrize("setting", [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_terminals_without_color_get_none(
    monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in shown(Terminal(), show_drafts=True)
    monkeypatch.setenv(*setting)
    assert "\x1b" not in shown(Terminal(), show_drafts=True) + render.legend(Terminal())
    assert "⟨" in shown(Terminal(), show_drafts=True)
