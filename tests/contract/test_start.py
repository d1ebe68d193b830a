"""The way in: which Python runs, prompts by pipe, and what is printed to terminals and to closed
streams."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .support import ROOT, Outcome, checkpoint, command

HOSTILE = "\x1b[31mred\x07\x9b5n\r\n\ttab \u202f!"
ESCAPED = "\\x1b[31mred\\x07\\x9b5n\\r\n\ttab \u202f!"
ESCAPE = "\x1b]0;mine\x07\x1b[31m"
SOURCE = ROOT / "tests" / "fixtures" / "t5" / "umt5-tied"


def shell(line: str, *, cwd: Path = ROOT, **environment: str) -> Outcome:
    """Run a line in which $P is this Python."""
    surroundings = {**os.environ, "P": sys.executable, **environment}
    done = subprocess.run(
        ["bash", "-c", line], env=surroundings, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone without models and without an environment."""
    directory = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "mlx_specdec", directory / "mlx_specdec")
    for name in ("main.py", "convert.py"):
        shutil.copy(ROOT / name, directory / name)
    return directory


PROGRAMS = ["main.py", "convert.py", "-m mlx_specdec"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_without_the_dependencies_says_what_to_run(clone: Path, program: str) -> None:
    done = shell(f"$P -S {program} x", cwd=clone, PYTHONPATH="")
    done.refuses("no typer", "./scripts/setup.sh")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_environment_of_the_clone_is_used(clone: Path, tmp_path: Path, program: str) -> None:
    here = Path(shutil.copytree(clone, tmp_path / "clone"))
    python = here / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o755)
    done = shell(f"$P -S {program} 'a b' -m 3", cwd=here, PYTHONPATH="")
    assert done == Outcome(0, f"-S|{program.replace(' ', '|')}|a b|-m|3|", "")


def test_ctrl_c_during_the_first_imports_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    assert shell("$P main.py x", PYTHONPATH=str(tmp_path)) == Outcome(130, "", "")


@pytest.mark.parametrize("command_name", ["generate", "bench", "estimate", "serve", "chat"])
def test_without_the_sample_models_a_pair_has_to_be_named(
    clone: Path, command_name: str, run_in_clone: dict[str, Outcome]
) -> None:
    run_in_clone[command_name].refuses("--model google/flan-t5-large", "mlx-specdec pairs")


@pytest.fixture(scope="module")
def run_in_clone(clone: Path) -> dict[str, Outcome]:
    """Run commands without arguments in one process of the clone."""
    script = (
        "import json, sys; from dataclasses import astuple; from tests.contract.support import "
        "command; print(json.dumps({name: astuple(command(name)) for name in sys.argv[1:]}))"
    )
    names = ("generate", "bench", "estimate", "serve", "chat")
    path = os.pathsep.join([str(clone), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: Outcome(*ended) for name, ended in json.loads(done.stdout).items()}


# Prompts by pipe.


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (["\udcff"], "", "not UTF-8"),
        (["-"], b"\xff", "not UTF-8"),
        (["-"], "", "standard input is empty"),
        (["-"], "\n", "standard input is empty"),
        (["--model", "/nowhere"], "", "no prompt"),
    ],
)
def test_prompts_that_are_none_are_reported_in_a_line(
    words: list[str], stdin: str | bytes, said: str
) -> None:
    command("generate", *words, stdin=stdin).refuses(said)


def test_a_pipe_and_a_file_are_prompts_and_an_argument_leaves_the_pipe_alone(
    t5: Path, tmp_path: Path
) -> None:
    flags = ("--model", t5, "--quiet", "-m", 9, "--no-cost-cache")
    wanted = command("generate", "Les pates", *flags)
    assert wanted.code == 0
    out, into = os.pipe()
    os.write(into, b"Les pates\n")
    os.close(into)
    with open(out, encoding="utf-8") as stream:
        assert command(*flags, stdin=stream) == wanted
    file = tmp_path / "prompt"
    file.write_text("Les pates\n")
    with file.open() as stream:
        assert command(*flags, stdin=stream) == wanted
    with file.open() as stream:
        assert command("Les pates", *flags, stdin=stream) == wanted
        assert stream.read() == "Les pates\n"


# Terminals and closed streams.


def test_completions_give_the_terminal_no_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    model = checkpoint(tmp_path, tokens=(HOSTILE,))
    last = json.loads((model / "config.json").read_text())["vocab_size"] - 1
    flags = ("--model", model, "--draft-model", model, "--num-draft", 1, "-m", 4, "--no-cost-cache")
    words = ("generate", "x", *flags, "--logit-bias", f"{last}=1000")
    assert command(*words, "--quiet").out == HOSTILE * 4 + "\n"
    assert command(*words, "--quiet", terminal=True).out == ESCAPED * 4 + "\n"
    marked = command(*words, "--show-drafts", terminal=True)
    assert marked.out.count("\x1b[32;4m") == marked.out.count("\x1b[0m") > 0
    assert marked.out.replace("\x1b[32;4m", "").replace("\x1b[0m", "") == ESCAPED * 4 + "\n"
    assert "\x1b[32;4maccepted draft tokens\x1b[0m" in marked.err


def test_names_of_directories_give_the_terminal_no_orders(tmp_path: Path) -> None:
    source = tmp_path / f"model{ESCAPE}\u202e"
    shutil.copytree(SOURCE, source)
    done = command("convert", "--model", source, "--mlx-path", tmp_path / f"out{ESCAPE}")
    assert done.code == 0 and done.err.count("\n") > 2
    assert all(line.isprintable() for line in done.err.splitlines())
    (source / "model.safetensors").write_bytes(b"1234")
    for words in (("inspect",), ("convert", "--mlx-path", tmp_path / "b", "--model")):
        done = command(*words, source)
        done.refuses("model\\x1b]0;mine")
        assert done.err.strip().isprintable()


@pytest.mark.parametrize(
    "line",
    [
        "$P -m mlx_specdec inspect $S --json <&- >&- 2>&-",
        "$P -m mlx_specdec convert --model $S --mlx-path $O 2>&1 | true; exit ${PIPESTATUS[0]}",
    ],
    ids=["closed", "no-reader"],
)
def test_closed_streams_are_no_errors(tmp_path: Path, line: str) -> None:
    done = shell(line, S=str(SOURCE), O=str(tmp_path / "out"))
    assert done.code == 0 and "Traceback" not in done.err + done.out, done.err
    assert (tmp_path / "out" / "model.safetensors").is_file() == ("convert" in line)
