"""`generate`: what it prints where, and that drafts do not change the text."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .support import PATIENCE, ROOT, Outcome, checkpoint, command, process

PROMPT = "Les pates a midi"
FIELDS = (
    "text tokens finish_reason prompt_tokens cached_tokens generated_tokens model draft_model "
    "proposer rule lossy delta seed num_draft exact stats draft_length"
)
STATS = (
    "acceptance_rate accepted accepted_by_position blas by_source device drafted "
    "drafted_by_position peak_memory_bytes rounds seconds target_passes timed_rounds "
    "tokens_per_round tokens_per_second"
)
SECONDS = "draft load other prompt prompt_draft total verify"


def strict(text: str) -> Any:
    """Parse JSON, without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def generated(*arguments: object) -> Any:
    """Return the object that `generate --json` prints, after nothing on standard error."""
    done = command("generate", *arguments, "--json", "--no-cost-cache")
    assert (done.code, done.err) == (0, ""), done
    return strict(done.out)


def test_text_goes_to_standard_output_and_statistics_to_standard_error(
    t5: Path, t5_draft: Path
) -> None:
    words = ("generate", PROMPT, "--model", t5, "-m", 30)
    plain = command(*words, "--regular-decode")
    assert plain.code == 0 and plain.out.endswith("\n") and len(plain.out) > 10
    assert "plain decoding" in plain.err and "tokens/s" in plain.err
    figures = r"prompt: (\d+) tokens in [0-9.]+ s, [0-9.]+ tokens/s;.*peak memory"
    found = re.search(figures, plain.err)
    assert found is not None and int(found[1]) > 0
    drafted = command(*words, "--draft-model", t5_draft, "--num-draft", 5, "--verbose")
    assert drafted.out == plain.out and "draft tokens accepted" in drafted.err
    # --verbose tells the reason of the draft length, and which draft tokens were accepted.
    assert re.search(r"^accepted by position: [01]\.\d\d ", drafted.err, re.MULTILINE)
    # Accepted draft tokens are marked by more than color.
    marked = command(*words, "--draft-model", t5_draft, "--num-draft", 5, "--show-drafts")
    assert "\x1b" not in marked.out + marked.err
    assert "⟨" in marked.out and "⟨accepted draft tokens⟩" in marked.err
    assert marked.out.replace("⟨", "").replace("⟩", "") == plain.out


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_json_object_has_every_field_and_is_all_that_is_printed(
    t5: Path, t5_draft: Path, temperature: int
) -> None:
    words = (PROMPT, "--model", t5, "-m", 40, "--temp", temperature, "--seed", 5)
    result = generated(*words, "--draft-model", t5_draft, "--num-draft", 3)
    stats = result["stats"]
    assert " ".join(result) == FIELDS
    assert (" ".join(sorted(stats)), " ".join(sorted(stats["seconds"]))) == (STATS, SECONDS)
    assert 0 < stats["seconds"]["prompt_draft"] < stats["seconds"]["prompt"]
    assert (result["proposer"], result["rule"], result["num_draft"]) == ("draft", "coupled", 3)
    assert result["generated_tokens"] == len(result["tokens"]) == 40
    assert 0 < stats["accepted"] <= stats["drafted"]
    plain = generated(*words, "--regular-decode")
    assert plain["tokens"] == result["tokens"] and plain["text"] == result["text"]
    assert (plain["proposer"], plain["draft_model"], plain["num_draft"]) == ("none", None, 0)
    assert set(plain) == set(result) and set(plain["stats"]) == set(stats)
    # JSON has no NaN: a rate of nothing is null.
    nothing = generated(*words, "--regular-decode", "-m", 0)
    assert (nothing["tokens"], nothing["stats"]["tokens_per_round"]) == ([], None)


def test_the_prompt_may_come_from_everywhere(t5: Path, tmp_path: Path) -> None:
    def said(*words: object, stdin: str = "") -> Outcome:
        return command("generate", *words, "--model-name", t5, "--quiet", "-m", 9, stdin=stdin)

    file, ended = tmp_path / "prompt.txt", tmp_path / "ended.txt"
    file.write_text(PROMPT, encoding="utf-8")
    ended.write_bytes(PROMPT.encode() + b"\r\n")
    wanted = said(PROMPT)
    assert (wanted.code, wanted.err) == (0, "")
    for source in (("--prompt", PROMPT), ("--prompt-file", file), ("--prompt-file", ended)):
        assert said(*source) == wanted
    for dash in (("-",), ("--prompt", "-")):
        for text in (PROMPT, f"{PROMPT}\n"):
            assert said(*dash, stdin=text) == wanted


def test_a_stop_string_ends_the_text_before_it(t5: Path, t5_draft: Path) -> None:
    words = (PROMPT, "--model", t5, "-m", 40)
    whole = generated(*words)["text"]
    stop = whole[len(whole) // 2 :][:3]
    for drafts in ((), ("--draft-model", t5_draft, "--num-draft", 5)):
        result = generated(*words, "--stop", stop, *drafts)
        assert (result["text"], result["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_a_chat_template_is_applied_unless_left_out(tmp_path: Path) -> None:
    template = "<|start|>{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    model = ("--model", checkpoint(tmp_path, template=template), "-m", 4)
    chatting, plain = generated("abc", *model), generated("abc", *model, "--no-chat-template")
    written = generated("<abc>", *model, "--no-chat-template")
    assert written["prompt_tokens"] == chatting["prompt_tokens"] > plain["prompt_tokens"]
    assert written["tokens"] == chatting["tokens"]


def test_drafts_come_from_lookup_if_no_draft_model_is_named(llama: Path) -> None:
    words = ("def read(path):\ndef read(path):\n", "--model", llama, "-m", 40)
    plain = generated(*words, "--regular-decode")
    assert plain["proposer"] == "none"
    for flags in (
        (),
        ("--proposer", "ngram"),
        ("--num-draft", 3),
        ("--num-draft", 3, "--ngram-min", 1),
    ):
        result = generated(*words, *flags)
        assert (result["tokens"], result["proposer"]) == (plain["tokens"], "ngram")
        assert result["draft_model"] is None and (3 not in flags or result["num_draft"] == 3)


def test_lookup_files_are_searched(llama: Path, tmp_path: Path) -> None:
    words = ("def read(path):", "--model", llama, "-m", 40, "--num-draft", 4)
    without = generated(*words, "--proposer", "ngram")
    (tmp_path / "a.txt").write_text(f"def read(path):{without['text']}", encoding="utf-8")
    (tmp_path / "b.txt").write_text("def read_lines", encoding="utf-8")
    files = ("--lookup-file", tmp_path / "a.txt", "--lookup-file", tmp_path / "b.txt")
    found = generated(*words, *files)
    assert (found["tokens"], found["proposer"]) == (without["tokens"], "ngram")
    assert found["stats"]["rounds"] < without["stats"]["rounds"]
    plain = generated(*words[:-2], *files, "--regular-decode")
    assert plain["tokens"] == without["tokens"]


def test_costs_of_rounds_are_kept_for_the_next_process_unless_switched_off(
    t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(cache))
    words = ("generate", PROMPT, "--model", t5, "-m", 40, "--logit-bias", "1=-1e9")
    auto = (*words, "--draft-model", t5, "--num-draft", "auto")
    plain = command(*words, "--regular-decode")
    assert command(*auto, "--no-cost-cache").out == plain.out and not [*cache.rglob("*.json")]
    assert command(*auto).out == plain.out
    [file] = cache.rglob("*.json")
    assert any(name.startswith("acceptance") for name in json.loads(file.read_text()))
    assert command(*auto).out == plain.out


# The streams of a process of its own.


def started(model: Path, *flags: str, **pipes: Any) -> "subprocess.Popen[str]":
    words = [sys.executable, "main.py", PROMPT, "--model", str(model), *flags]
    surroundings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        words, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=surroundings, **pipes
    )


def test_a_reader_that_leaves_ends_the_program_quietly(t5: Path) -> None:
    process = started(t5, "-m", "1000000", "--no-cost-cache", stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    process.stdout.close()
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_cannot_be_written_is_reported(t5: Path) -> None:
    with open("/dev/full", "w") as full:
        process = started(t5, "-m", "9", stdout=full)
        _, err = process.communicate(timeout=PATIENCE)
    Outcome(process.returncode, "", err).refuses("standard output")


def test_ctrl_c_keeps_the_text_and_exits_with_130(t5: Path) -> None:
    process = started(t5, "-m", "1000000", "--no-cost-cache", stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in err and "finish reason: interrupted" in err


def test_any_other_word_is_a_prompt_and_so_is_every_word_after_generate(llama: Path) -> None:
    flags = ("--model", llama, "-m", 2, "--quiet", "--no-cost-cache")
    listen, named = command("listen", *flags), command("generate", "listen", *flags)
    assert (listen.code, listen.out) == (0, named.out)
    assert command("generate", "list", *flags).code == command("list things", *flags).code == 0


def test_a_name_that_is_neither_here_nor_on_the_hub_is_said_to_be_neither(tmp_path: Path) -> None:
    # The library reads the address when it is imported.
    address = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = process("generate", "x", "--model", "some/model", **address)
    done.refuses("there is no directory some/model here, and the Hub cannot be reached")
