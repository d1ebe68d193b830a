"""--help for people: whole sentences, groups, choices, an example, the terminal's width."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mlx_specdec.cli import app as program
from mlx_specdec.cli.generate import GenerateFlags
from mlx_specdec.errors import OptionError
from mlx_specdec.options import Options

from ..support.commands import COMMANDS, Outcome, Run, fails, strict

ROOT = Path(__file__).parents[2]


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`mlx-specdec` with these arguments."""
    given = {**os.environ, **environment}
    command = [sys.executable, "-m", "mlx_specdec", *arguments]
    return subprocess.run(
        command, env=given, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


Here = Callable[..., str]


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The same in this process: what is printed."""

    def printed(*arguments: str, **environment: str) -> str:
        monkeypatch.setattr(sys, "argv", ["mlx-specdec", *arguments])
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            program.main()
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    return printed


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the program with these arguments, the command among them."""

    def run_program(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["mlx-specdec", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            program.main()
        out, err = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return run_program


def test_flags_without_a_command_are_those_of_generate(whole: Run, t5: Path) -> None:
    flags = ("--model", t5, "-m", 9, "--quiet", "--no-cache")
    wanted = whole("generate", "Les pates", *flags)
    assert wanted.code == 0 and whole(*flags, "Les pates") == wanted
    fails(whole("--model", t5, "chat"), "after the command: mlx-specdec chat --model")
    fails(whole("--modle", t5, "x"), "--modle", "--model")


def test_help_is_a_command(whole: Run) -> None:
    assert whole("help") == whole("--help") and whole("help").code == 0
    assert whole("help", "chat") == whole("chat", "--help")


def test_the_program_lists_its_commands() -> None:
    done = run_cli("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_cli("-h").stdout
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*\.$", done.stdout, re.MULTILINE), name
    assert "..." not in done.stdout.replace("[ARGS]...", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_takes(run: Run, name: str) -> None:
    done = run(name, "-h")
    assert (done.code, done.err) == (0, "") and done.out == run(name, "--help").out
    assert "<" not in done.out and "list[" not in done.out and "None" not in done.out
    assert "Example:\n    mlx-specdec " + name in done.out
    panels = re.findall(r"^([A-Z][a-z ]+):$", done.out, re.MULTILINE)
    assert panels[-1] == "Other" and "Options" not in panels
    assert len(panels) >= 2 or name == "doctor"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_explained_in_a_sentence(name: str) -> None:
    group: Any = typer.main.get_command(program.app)
    for parameter in group.commands[name].params:
        said = parameter.help
        assert re.fullmatch(r"[A-Z].*\.", said), (parameter.name, said)
        assert len(said.split()) >= 3, (parameter.name, said)


def test_the_limit_of_an_answer_is_explained_where_requests_have_their_own(run: Run) -> None:
    words = " ".join(run("serve", "-h").out.split())
    assert "The largest number of tokens of an answer whose request names none." in words
    assert "Sampling flags are the defaults of requests that do not set them." in words


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_wider_than_a_plain_terminal(name: str, asked_here: Here) -> None:
    output = asked_here(name, "-h", COLUMNS="80", TERM="dumb")
    assert max(map(len, output.splitlines())) <= 80
    assert "\x1b" not in output


def test_every_setting_of_a_generation_has_a_flag_with_its_default() -> None:
    assert GenerateFlags().options() == Options()
    only_in_python = {
        "ngram_choice",
        "posterior_alpha",
        "posterior_threshold",
        "xtc_special_tokens",
    }
    reached = {*GenerateFlags().for_options(), *only_in_python}
    assert reached == {field.name for field in dataclasses.fields(Options)}


@pytest.mark.parametrize(
    "flags",
    [
        ("-p", "Les pates"),
        ("--prompt", "Les pates", "--ignore-chat-template"),
        ("-p", "Les pates", "--num-draft-tokens", 3, "--proposer", "ngram"),
        ("-p", "Les pates", "--prefill-step-size", 2, "--xtc-probability", 0.5),
        ("-p", "Les pates", "--extra-eos-token", "<unk>", "--extra-eos-token", 1),
    ],
)
def test_the_names_that_mlx_lm_has_are_taken(run: Run, t5: Path, flags: tuple) -> None:
    plain = run("generate", "Les pates", "--model", t5, "--json", "-m", 9)
    done = run("generate", "--model", t5, "--json", "-m", 9, *flags)
    assert strict(done.out)["tokens"] == strict(plain.out)["tokens"]
    if "--num-draft-tokens" in flags:
        assert strict(done.out)["num_draft"] == 3


def test_a_revision_reaches_the_hub(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: object, revision: str | None = None, **rest: object) -> None:
        raise OptionError(f"loading {revision}")

    monkeypatch.setattr("mlx_specdec.engine.loading.load", load)
    done = run("generate", "x", "--model", "some/model", "--revision", "v2")
    assert (done.code, done.err) == (2, "error: loading v2\n")


def test_a_terminal_without_arguments_shows_the_first_steps(
    whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = whole()
    assert (done.code, done.err) == (0, "") and done.out == program.FIRST_STEPS
    assert max(map(len, done.out.splitlines())) <= 100 and done.out.count("\n") <= 10
    for command in re.findall(r"^  mlx-specdec ([a-z]+) ", done.out, re.MULTILINE):
        assert command == "help" or command in COMMANDS


def test_completion_is_offered() -> None:
    done = run_cli("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0 and "complete" in done.stdout


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("gen", {"generate"}),
        ("generate --proposer n", {"ngram", "none"}),
        ("generate --rule b", {"block"}),
        ("generate --draft-m", {"--draft-model", "--draft-model-name"}),
        ("generate --model weights/t5-enfr-", {"weights/t5-enfr-draft", "weights/t5-enfr-medusa"}),
        ("chat --draft-model mt", {"mtp"}),
    ],
)
def test_what_is_typed_is_completed(typed: str, completions: set[str]) -> None:
    words = f"mlx-specdec {typed}"
    asked_for = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    installed = "import sys; sys.argv = ['mlx-specdec']; from mlx_specdec.cli import start"
    done = subprocess.run(
        [sys.executable, "-c", f"{installed}; start.main()"],
        env={**os.environ, **asked_for, "_MLX_SPECDEC_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
    )
    assert set(done.stdout.split()) == completions
