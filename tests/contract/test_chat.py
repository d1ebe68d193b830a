"""`chat`: what is said, which commands are obeyed, and what ends an answer or the chat."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from .interruption import interrupted
from .support import Outcome, checkpoint, command
from .translators import END, translator

FIRST = "USER: def\nASSISTANT:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def say(model: Path) -> Callable[..., Outcome]:
    """Return a function that chats with the model; the lines come from a pipe."""

    def chat(*lines: str, flags: tuple[object, ...] = (), model: Path = model) -> Outcome:
        said = "".join(f"{line}\n" for line in lines)
        return command("chat", "--model", model, "-m", 12, "--no-cost-cache", *flags, stdin=said)

    return chat


Say = Callable[..., Outcome]
Alone = Callable[[str], str]


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    """Return a function that tells the completion of a prompt by itself."""
    pair, options = load(model), Options(max_tokens=12, regular=True, chat_template=False)
    return lambda prompt: generate(pair, prompt, options).text


def test_answers_know_what_was_said_before(say: Say, alone: Alone) -> None:
    first = alone(FIRST)
    second = alone(f"{FIRST} {first}\nUSER: x\nASSISTANT:")
    done = say("def", "x", flags=("--proposer", "ngram", "--quiet"))
    assert (done.code, done.err) == (0, "")
    assert done.out == "".join(t if t.endswith("\n") else t + "\n" for t in (first, second))


def test_a_turn_needs_no_prefill_of_the_turns_before_it(say: Say, alone: Alone) -> None:
    said = "def read_lines"
    drafting = ("--proposer", "ngram", "--num-draft", 8)
    done = say(said, "x", "/stats", "/reset", said, "/stats", flags=drafting)
    cached = [int(count) for count in re.findall(r"\((\d+) more were known\)", done.err)]
    assert len(cached) == 2 and cached[0] > cached[1] > len(said.split())
    assert done.out.count(alone(f"USER: {said}\nASSISTANT:")) == 2
    # After /reset, lookup still drafts from what was written before it.
    [*_, accepted] = re.findall(r"(\d+) of \d+ draft tokens accepted", done.err)
    assert int(accepted) > 6


def test_a_reset_forgets_and_a_system_message_stays(say: Say, alone: Alone) -> None:
    plain, calm = alone(FIRST), alone(f"ASSISTANT's RULE: Be calm.\n{FIRST}")
    done = say("def", "/reset", "def", "/system Be calm.", "def", "/exit", "never said")
    assert done.code == 0
    assert done.out.count(plain) == 2 and calm in done.out
    assert calm in say("def", flags=("--system-prompt", "Be calm.")).out


def test_several_lines_are_one_message(say: Say, alone: Alone) -> None:
    wanted = alone("USER: a\nb\nASSISTANT:")
    done = say("a\\", "b", "/reset", '"""a', 'b"""')
    assert done.out.count(wanted) == 2


def test_a_conversation_is_saved_and_loaded(say: Say, alone: Alone, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first = alone(FIRST)
    done = say("def", f"/save {file}")
    assert f"2 messages are in {file}" in done.err
    messages = json.loads(file.read_text())["messages"]
    assert messages == [{"role": "user", "content": "def"}, {"role": "assistant", "content": first}]
    assert alone(f"{FIRST} {first}\nUSER: x\nASSISTANT:") in say(f"/load {file}", "x").out


def test_speculation_is_switched_and_the_answer_stays(say: Say, alone: Alone) -> None:
    lines = []
    for what in ("off", "3", "on", "auto"):
        lines += ["/reset", f"/speculate {what}", "def", "/stats"]
    done = say(*lines, flags=("--proposer", "ngram"))
    assert done.out.count(alone(FIRST)) == 4
    assert done.err.count("plain decoding") == 1 and done.err.count("rule coupled") == 3


WRONG = {
    "/nothing": "there is no command /nothing",
    "/save": "say where",
    "/save /nowhere/at/all": "cannot write /nowhere/at/all",
    "/load /nowhere/at/all": "cannot read /nowhere/at/all",
    "/load pyproject.toml": "is no conversation",
    "/speculate much": "/speculate must be a number or auto",
    "/speculate 99": "num-draft must",
    "x" * 20_000: "the model takes 4096: /reset begins a new one",
}


def test_what_cannot_be_done_is_reported_and_the_chat_goes_on(say: Say, alone: Alone) -> None:
    done = say(*WRONG, "def")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == 0 and alone(FIRST) in done.out
    assert all(part in line for part, line in zip(WRONG.values(), errors, strict=True)), errors


def test_an_interrupt_stops_the_answer_and_not_the_chat(say: Say, alone: Alone) -> None:
    def some_is_written(asked: int) -> bool:
        output: Any = sys.stdout.buffer  # `command` keeps it in memory
        return len(output.getvalue()) > 3

    with interrupted(some_is_written):
        done = say("def", "/stats", "/reset", "def", "/stats", flags=("--regular-decode",))
    assert done.code == 0
    assert done.err.index("finish reason: interrupted") < done.err.index("finish reason: length")
    first, second = done.out.splitlines()
    assert second == alone(FIRST) and second.startswith(first.rstrip("�")) and first != second


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye", "exit"])
def test_a_chat_ends_with_the_words_of_other_programs(say: Say, word: str) -> None:
    done = say(word, "def")
    assert (done.code, done.out) == (0, "") and "error" not in done.err


def test_an_answer_without_words_is_explained(say: Say, model: Path) -> None:
    bias = ("--logit-bias", f"{END}=1e9")
    done = say("def", flags=(*bias, "--quiet"))
    explained = "the model ended at once and wrote nothing: a longer prompt may help\n"
    assert (done.code, done.err) == (0, explained)
    once = ("generate", "def", "--model", model, *bias, "--no-cost-cache")
    done = command(*once, "--quiet")
    assert (done.out, done.err) == ("\n", explained)
    assert command(*once, "--json").err == ""


def test_a_translator_answers_each_message_by_itself(say: Say, tmp_path: Path) -> None:
    done = say("les", "les", "/system no", model=translator(tmp_path))
    assert done.code == 0
    first, second = done.out.splitlines()
    assert first == second
    assert "answers each message by itself" in done.err and "takes no message of the" in done.err


def test_the_first_conversation_of_a_newcomer_is_a_translation() -> None:
    done = command("chat", "--no-cost-cache", stdin="Where is the station?\n")
    assert done.out.splitlines() == ["Où est la gare ?"]
    assert 'with "translate English to French: " before it' in done.err
