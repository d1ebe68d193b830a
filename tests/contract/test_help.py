"""--help for people: whole sentences, groups, choices, an example, the terminal's width; and names
of flags, which shells complete."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mlx_specdec import Options

from .support import command

COMMANDS = (
    *("batch", "bench", "chat", "convert", "doctor", "estimate", "generate"),
    *("inspect", "models", "pairs", "serve", "train-draft", "train-medusa"),
)
OTHER_FLAGS = {"regular": "--regular-decode", "chat_template": "--no-chat-template"}
OTHER_FLAGS |= {"cost_cache": "--no-cost-cache"}
ONLY_IN_PYTHON = {
    "ngram_choice",
    "posterior_alpha",
    "posterior_threshold",
    "xtc_special_tokens",
}
"""Settings of Options that have no flag."""


@pytest.fixture(autouse=True)
def named_mlx_specdec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program find its name where it does if it was installed."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


def explained(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the flags and arguments of a help text, with the explanation and the default of each.
    All flags are found: none lacks its explanation."""
    row = r"^  (\S.*?)(?:  +|\n {10,})(\S.*(?:\n {10,}.*)*)"
    text = text[text.index(":\n") :].partition("\n  Example:")[0]
    rows = re.findall(row, text, re.MULTILINE)
    flags = [name for name, _ in rows if name.startswith("-")]
    assert len(flags) == len(re.findall(r"^  -", text, re.MULTILINE))
    for name, words in rows:
        facts = r" \[(?:default: ([^]]+)|required|env var: [^]]+|[^]]*[<>][^]]*)\]$"
        said, default = " ".join(words.split()), ""
        while found := re.search(facts, said):
            said, default = said[: found.start()], found[1] or default
        yield name, said, default


def test_flags_without_a_command_are_those_of_generate(t5: Path) -> None:
    flags = ("--model", t5, "-m", 9, "--quiet", "--no-cost-cache")
    wanted = command("generate", "Les pates", *flags)
    assert wanted.code == 0 and command(*flags, "Les pates") == wanted
    command("--model", t5, "chat").refuses("after the command: mlx-specdec chat --model")
    command("--modle", t5, "x").refuses("--modle", "--model")


def test_the_program_lists_its_commands() -> None:
    shown = command("--help")
    assert (shown.code, shown.err) == (0, "")
    assert shown == command("-h") == command("help")
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*\.$", shown.out, re.MULTILINE), name
    assert "..." not in shown.out.replace("[ARGS]...", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command(name, "-h")
    assert (done.code, done.err) == (0, "")
    assert done == command(name, "--help") == command("help", name)
    assert "<" not in done.out and "list[" not in done.out and "None" not in done.out
    assert "Example:\n    mlx-specdec " + name in done.out
    panels = re.findall(r"^([A-Z][a-z ]+):$", done.out, re.MULTILINE)
    assert panels[-1] == "Other" and "Options" not in panels
    assert len(panels) >= 2 or name == "doctor"
    found = [*explained(done.out)]
    assert len(found) >= (1 if name == "doctor" else 3)
    for flag, said, _ in found:
        assert re.fullmatch(r"[A-Z].*\.", said) and len(said.split()) >= 3, (flag, said)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    plain = command(name, "-h", terminal=True).out
    assert max(map(len, plain.splitlines())) <= 80 and "\x1b" not in plain


def test_every_setting_of_a_generation_has_a_flag_with_its_default() -> None:
    defaults = {
        flag: default
        for names, _, default in explained(command("generate", "-h").out)
        for flag in re.findall(r"--[a-z-]+", names)
    }
    checked = 0
    for field in dataclasses.fields(Options):
        flag = OTHER_FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
        assert (flag in defaults) == (field.name not in ONLY_IN_PYTHON), field.name
        if (default := defaults.get(flag, "")) and default[0] != "(":
            assert default == str(getattr(Options(), field.name)), field.name
            checked += 1
    assert checked >= 8


@pytest.fixture(scope="module")
def plain(t5: Path) -> list[int]:
    """The tokens of a prompt's completion."""
    words = ("Les pates", "--model", t5, "--no-cost-cache", "-m", 9, "--json")
    tokens: list[int] = json.loads(command("generate", *words).out)["tokens"]
    return tokens


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
def test_the_names_that_mlx_lm_has_are_taken(
    t5: Path, plain: list[int], flags: tuple[object, ...]
) -> None:
    model = ("--model", t5, "--no-cost-cache", "-m", 9)
    done = command("generate", *model, "--json", *flags)
    assert done.code == 0 and json.loads(done.out)["tokens"] == plain
    assert json.loads(done.out)["num_draft"] == 3 or "--num-draft-tokens" not in flags


def test_a_terminal_without_arguments_shows_the_first_steps() -> None:
    done = command(terminal=True)
    assert (done.code, done.err) == (0, "") and "First steps" in done.out
    assert max(map(len, done.out.splitlines())) <= 100 and done.out.count("\n") <= 10
    named = re.findall(r"^  mlx-specdec ([a-z]+) ", done.out, re.MULTILINE)
    assert len(named) > 3 and {*named} <= {*COMMANDS, "help"}


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
def test_what_is_typed_is_completed(
    typed: str, completions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"mlx-specdec {typed}"
    monkeypatch.setenv("_MLX_SPECDEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert {*command().out.split()} == completions
