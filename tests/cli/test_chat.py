"""The chat command: what is said, what is obeyed, and what ends it."""

import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_specdec.cli import render
from mlx_specdec.cli.chat import Answers
from mlx_specdec.decoding.loop import Decoding
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.options import Options

from ..support.commands import Outcome, Run
from ..support.models import make_llama

Say = Callable[..., Outcome]
FIRST = "USER: def\nASSISTANT:"


@pytest.fixture
def say(run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Chat with the tiny model; what is said comes from a pipe."""

    def chat(*lines: str, flags: tuple[object, ...] = (), model: Path = llama) -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", "--model", model, "-m", 12, "--no-cache", *flags)

    return chat


@pytest.fixture(scope="module")
def alone(llama: Path) -> Callable[..., str]:
    pair = load(llama)

    def text(prompt: str, **settings: object) -> str:
        options = Options(max_tokens=12, regular=True, chat_template=False, **settings)
        return generate(pair, prompt, options).text

    return text


def test_answers_know_what_was_said_before(say: Say, alone: Callable[..., str]) -> None:
    first = alone(FIRST)
    second = alone(f"{FIRST} {first}\nUSER: x\nASSISTANT:")
    done = say("def", "x", flags=("--proposer", "ngram", "--quiet"))
    assert (done.code, done.err) == (0, "")
    assert done.out == "".join(t if t.endswith("\n") else t + "\n" for t in (first, second))


def test_what_was_read_in_a_turn_is_not_read_again(say: Say, alone: Callable[..., str]) -> None:
    said = "def read_lines"
    drafting = ("--proposer", "ngram", "--num-draft", 8)
    done = say(said, "x", "/stats", "/reset", said, "/stats", flags=drafting)
    known = [int(each) for each in re.findall(r"\((\d+) more were known\)", done.err)]
    assert len(known) == 2 and known[0] > known[1] > len(said.split())
    first = alone(f"USER: {said}\nASSISTANT:")
    assert done.out.count(first) == 2
    # After the reset it is drafted from what was written before that.
    accepted = re.findall(r"(\d+) of \d+ draft tokens accepted", done.err)[-1]
    assert int(accepted) > 6


def test_a_reset_forgets_and_a_system_message_stays(say: Say, alone: Callable[..., str]) -> None:
    plain = alone(FIRST)
    calm = alone(f"ASSISTANT's RULE: Be calm.\n{FIRST}")
    done = say("def", "/reset", "def", "/system Be calm.", "def", "/exit", "never said")
    assert done.code == 0
    assert done.out.count(plain) == 2 and calm in done.out
    assert calm in say("def", flags=("--system-prompt", "Be calm.")).out


def test_several_lines_are_one_message(say: Say, alone: Callable[..., str]) -> None:
    wanted = alone("USER: a\nb\nASSISTANT:")
    assert wanted in say("a\\", "b").out
    assert wanted in say('"""a', 'b"""').out


def test_a_conversation_is_saved_and_loaded(
    say: Say, alone: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    first = alone(FIRST)
    done = say("def", f"/save {file}")
    assert f"2 messages are in {file}" in done.err
    messages = json.loads(file.read_text())["messages"]
    assert messages == [{"role": "user", "content": "def"}, {"role": "assistant", "content": first}]
    assert alone(f"{FIRST} {first}\nUSER: x\nASSISTANT:") in say(f"/load {file}", "x").out


def test_speculation_is_switched_and_the_text_stays(say: Say, alone: Callable[..., str]) -> None:
    text = alone(FIRST)
    lines = []
    for what in ("off", "3", "on", "auto"):
        lines += ["/reset", f"/speculate {what}", "def", "/stats"]
    done = say(*lines, flags=("--proposer", "ngram"))
    assert done.out.count(text) == 4
    assert done.err.count("plain decoding") == 1 and done.err.count("rule coupled") == 3


def test_drafts_are_marked_on_demand(
    say: Say, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = ("--draft-model", llama, "--num-draft", 3)
    with monkeypatch.context() as patch:
        patch.setattr(render, "wants_color", lambda stream: True)
        colored = say("/drafts", flags=drafting).err
        assert f"{render.GREEN_UNDERLINED}accepted draft tokens{render.PLAIN}" in colored
    shown = say("/drafts", "def", flags=drafting)
    assert "⟨" in shown.out and "⟨accepted draft tokens⟩" in shown.err
    assert "⟨" not in say("/drafts", "/drafts", "def", flags=drafting).out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nothing", "there is no command /nothing"),
        ("/save", "say where"),
        ("/save /nowhere/at/all", "cannot write /nowhere/at/all"),
        ("/load /nowhere/at/all", "cannot read /nowhere/at/all"),
        ("/load pyproject.toml", "is no conversation"),
        ("/speculate much", "/speculate must be a number or auto"),
        ("/speculate 99", "num-draft must"),
        ("x" * 20_000, "the model takes 4096: /reset begins a new one"),
    ],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_done_is_reported_and_the_chat_goes_on(
    say: Say, alone: Callable[..., str], line: str, said: str
) -> None:
    done = say(line, "def")
    assert done.code == 0 and said in done.err and alone(FIRST) in done.out


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Decoding.step, 0

    def interrupted(self: Decoding):
        nonlocal steps
        steps += 1
        if steps == 6:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Decoding, "step", interrupted)
    done = say("def", "/stats", "/reset", "def", "/stats")
    assert done.code == 0
    assert "finish reason: interrupted" in done.err and "finish reason: length" in done.err


def test_a_template_is_used_where_there_is_one(say: Say, tmp_path: Path) -> None:
    model = make_llama(tmp_path, chat_template="{{ messages[-1].content }}|")
    pair = load(model)
    ids = pair.tokenizer.encode("def|")[1:]
    wanted = generate(pair, ids, Options(max_tokens=12, regular=True)).text
    assert wanted in say("def", model=model).out


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye", "exit"])
def test_a_chat_ends_with_the_words_of_other_programs(say: Say, word: str) -> None:
    done = say(word, "def")
    assert (done.code, done.out) == (0, "") and "error" not in done.err


def test_an_answer_that_is_cut_says_so(run: Run, say: Say, llama: Path) -> None:
    said = "stopped at 12 tokens (--max-tokens)\n"
    assert said in say("def").err
    alone = ("generate", "def", "--model", llama, "-m", 12, "--no-cache")
    assert said in run(*alone).err and run(*alone, "--quiet").err == ""
    assert Answers().options().max_tokens >= 2048


def test_an_answer_without_words_is_explained(run: Run, say: Say, tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    bias = ("--logit-bias", f"{load(model).tokenizer.eos_token_ids[0]}=1e9")
    done = say("def", model=model, flags=(*bias, "--quiet"))
    assert (done.code, done.err) == (
        0,
        "the model ended at once and wrote nothing: a longer prompt may help\n",
    )
    alone = run("generate", "def", "--model", model, *bias, "--quiet")
    assert (alone.out, alone.err) == ("\n", done.err)
    assert run("generate", "def", "--model", model, *bias, "--json").err == ""


def test_a_translator_answers_each_message_by_itself(say: Say, t5: Path) -> None:
    done = say("les", "les", "/system no", model=t5)
    assert done.code == 0
    first, second = done.out.splitlines()
    assert first == second
    assert "answers each message by itself" in done.err and "takes no message of the" in done.err


def test_the_first_conversation_of_a_newcomer_is_a_translation(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Where is the station?\n"))
    done = run("chat", "--no-cache")
    assert done.out.splitlines() == ["Où est la gare ?"]
    assert 'with "translate English to French: " before it' in done.err
