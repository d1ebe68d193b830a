"""The generate command: what it prints where, and that speculation does not change it."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.checkpoints import disk as sizes
from mlx_specdec.cli import render
from mlx_specdec.cli.generate import read_prompt
from mlx_specdec.models import number_format

from ..support.commands import Run, fails, records, strict, write
from ..support.models import make_llama

ROOT = Path(__file__).parents[2]
PROMPT = "Les pates a midi"


def test_text_goes_to_standard_output_and_statistics_to_standard_error(
    run: Run, t5: Path, t5_draft: Path
) -> None:
    plain = run("generate", PROMPT, "--model", t5, "--regular-decode", "-m", 30)
    assert plain.code == 0 and plain.out.endswith("\n") and len(plain.out) > 10
    assert "plain decoding" in plain.err and "tokens/s" in plain.err
    output = re.search(
        r"prompt: (\d+) tokens in [0-9.]+ s, [0-9.]+ tokens/s;.*peak memory", plain.err
    )
    assert output is not None and int(output[1]) > 0
    done = run(
        "generate", PROMPT, "--model", t5, "--draft-model", t5_draft, "-m", 30, "--num-draft", 5
    )
    assert done.out == plain.out
    assert "draft tokens accepted" in done.err


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_json_object_has_every_field_and_is_all_that_is_printed(
    run: Run, t5: Path, t5_draft: Path, temperature: int
) -> None:
    arguments = ("--model", t5, "-m", 40, "--json", "--temp", temperature, "--seed", 5)
    done = run("generate", PROMPT, *arguments, "--draft-model", t5_draft, "--num-draft", 3)
    result = strict(done.out)
    assert done.err == ""
    assert " ".join(result) == (
        "text tokens finish_reason prompt_tokens cached_tokens generated_tokens model draft_model "
        "proposer rule lossy delta seed num_draft exact stats draft_length"
    )
    assert " ".join(sorted(result["stats"])) == (
        "acceptance_rate accepted accepted_by_position blas by_source device drafted "
        "drafted_by_position peak_memory_bytes rounds seconds target_passes "
        "timed_rounds tokens_per_round tokens_per_second"
    )
    seconds = result["stats"]["seconds"]
    assert " ".join(sorted(seconds)) == "draft load other prompt prompt_draft total verify"
    assert 0 < seconds["prompt_draft"] < seconds["prompt"]
    assert (result["proposer"], result["rule"], result["num_draft"]) == ("draft", "coupled", 3)
    assert result["generated_tokens"] == len(result["tokens"]) == 40
    assert 0 < result["stats"]["accepted"] <= result["stats"]["drafted"]
    plain = strict(run("generate", PROMPT, *arguments, "--regular-decode").out)
    assert plain["tokens"] == result["tokens"] and plain["text"] == result["text"]
    assert (plain["proposer"], plain["draft_model"], plain["num_draft"]) == ("none", None, 0)
    assert set(plain) == set(result) and set(plain["stats"]) == set(result["stats"])


def test_the_prompt_may_come_from_everywhere(
    run: Run, t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    ended = tmp_path / "ended.txt"
    ended.write_bytes(PROMPT.encode() + b"\r\n")
    wanted = run("generate", PROMPT, "--model-name", t5, "--quiet", "-m", 9)
    assert wanted.err == ""
    for source in (("--prompt", PROMPT), ("--prompt-file", file), ("--prompt-file", ended)):
        assert run("generate", *source, "--model", t5, "--quiet", "-m", 9).out == wanted.out
    for dash in (("-",), ("--prompt", "-")):
        for text in (PROMPT, f"{PROMPT}\n"):
            monkeypatch.setattr(sys, "stdin", io.StringIO(text))
            assert run("generate", *dash, "--model", t5, "--quiet", "-m", 9).out == wanted.out


def test_only_the_line_break_that_ends_a_file_is_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("\na\n\n", encoding="utf-8")
    assert read_prompt(None, None, file) == "\na\n"
    assert read_prompt("a\n", None, None) == "a\n"


def test_the_reason_of_the_draft_length_is_told_with_what_was_accepted() -> None:
    stats = SimpleNamespace(rounds=5, drafted_by_position=(3,), accepted_by_position=(2,))
    result: Any = SimpleNamespace(stats=stats)
    lines = render.lengths("draft: 2 draft tokens", result).splitlines()
    assert lines == ["draft: 2 draft tokens", "accepted by position: 0.67"]


def test_several_lines_for_an_encoder_decoder_get_a_word_about_batch(
    run: Run, t5: Path, llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    for model, text, warned in (
        (t5, "les pates\n\na midi\n", True),
        (t5, "les pates\n\n", False),
        (llama, "def f(x):\n    return x\n", False),
    ):
        file.write_text(text)
        done = run("generate", "--prompt-file", file, "--model", model, "-m", 3, "--quiet")
        assert done.code == 0 and done.out
        assert ("warning: the 2 lines" in done.err and "mlx-specdec batch" in done.err) == warned


def test_drafts_are_marked_by_more_than_colour(run: Run, t5: Path, t5_draft: Path) -> None:
    arguments = ("--model", t5, "--draft-model", t5_draft, "-m", 40, "--num-draft", 4)
    marked = run("generate", PROMPT, *arguments, "--show-drafts")
    plain = run("generate", PROMPT, *arguments)
    assert "\x1b" not in marked.out + marked.err
    assert "⟨" in marked.out and "⟨accepted draft tokens⟩" in marked.err
    assert marked.out.replace("⟨", "").replace("⟩", "") == plain.out


def test_a_stop_string_ends_the_text_before_it(run: Run, t5: Path, t5_draft: Path) -> None:
    whole = run("generate", PROMPT, "--model", t5, "-m", 40, "--quiet").out.rstrip("\n")
    stop = whole[len(whole) // 2 :][:3]
    for extra in ((), ("--draft-model", t5_draft, "--num-draft", 5)):
        arguments = ("--model", t5, "-m", 40, "--stop", stop, "--json", *extra)
        result = strict(run("generate", PROMPT, *arguments).out)
        assert result["text"] == whole[: whole.index(stop)]
        assert result["finish_reason"] == "stop"


def test_a_chat_template_is_applied_unless_left_out(run: Run, tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    chat = make_llama(tmp_path, chat_template=template, tokenizer_class="PreTrainedTokenizerFast")
    with_template = strict(run("generate", "abc", "--model", chat, "--json", "-m", 2).out)
    without = strict(
        run("generate", "abc", "--model", chat, "--json", "-m", 2, "--no-chat-template").out
    )
    assert with_template["prompt_tokens"] != without["prompt_tokens"]


def test_a_closed_standard_output_ends_quietly(t5: Path) -> None:
    command = f"'{sys.executable}' main.py '{PROMPT}' --model '{t5}' -m 200 | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, check=False
    )
    assert done.stderr == b""
    assert done.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("flags", ["", "--json"])
def test_an_output_that_cannot_be_written_is_reported(t5: Path, flags: str) -> None:
    command = f"'{sys.executable}' main.py '{PROMPT}' --model '{t5}' -m 9 {flags} > /dev/full"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "standard output" in done.stderr


def test_ctrl_c_keeps_the_text_and_exits_with_130(t5: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "main.py", PROMPT, "--model", t5, "-m", "1000000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and "finish reason: interrupted" in err


def test_lookup_files_are_searched(run: Run, llama: Path, tmp_path: Path) -> None:
    undrafted = ("generate", "def read(path):", "--model", llama, "-m", 40)
    arguments = (*undrafted, "--num-draft", 4)
    plain = run(*undrafted, "--regular-decode")
    (tmp_path / "a.txt").write_text(f"def read(path):{plain.out}", encoding="utf-8")
    (tmp_path / "b.txt").write_text("def read_lines", encoding="utf-8")
    files = ("--lookup-file", tmp_path / "a.txt", "--lookup-file", tmp_path / "b.txt")
    first = strict(run(*arguments, *files, "--json").out)
    assert first["text"] + "\n" == plain.out
    assert first["proposer"] == "ngram"
    without = strict(run(*arguments, "--proposer", "ngram", "--json").out)
    assert first["stats"]["rounds"] < without["stats"]["rounds"]
    assert run(*undrafted, *files, "--regular-decode").out == plain.out


def test_a_model_alone_is_drafted_for_by_lookup(run: Run, llama: Path) -> None:
    arguments = ("generate", "def read(path):", "--model", llama, "-m", 60, "--no-cache", "--json")
    output, plain = strict(run(*arguments).out), strict(run(*arguments, "--regular-decode").out)
    assert (output["proposer"], plain["proposer"]) == ("ngram", "none")
    assert output["tokens"] == plain["tokens"]


def test_lookup_needs_no_draft_model(run: Run, llama: Path) -> None:
    arguments = ("generate", "def read(path):\ndef read(path):\n", "--model", llama, "-m", 40)
    plain = run(*arguments)
    for flags in (
        ("--proposer", "ngram"),
        ("--speculate", 3),
        ("--speculate", 3, "--ngram-min", 1),
    ):
        assert run(*arguments, *flags).out == plain.out
    for flag in ("--speculate", "--num-draft"):
        output = strict(run(*arguments, flag, 3, "--json").out)
        assert (output["proposer"], output["num_draft"]) == ("ngram", 3)
        assert output["draft_model"] is None


def test_numbers_that_json_lacks_are_null() -> None:
    output = {"a": float("nan"), "b": [1.5, (float("inf"), -float("inf"))], "c": "NaN"}
    assert strict(render.as_json(output)) == {"a": None, "b": [1.5, [None, None]], "c": "NaN"}


# One line says what was chosen for quantized weights on a CPU, and a flag chooses otherwise.


MODEL = Path(__file__).parents[2] / "weights" / "py-llama-draft"
ARGUMENTS = ("generate", "def f(x):", "--model", MODEL, "-m", 2, "--no-cache", "--regular-decode")


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "its quantized weights are expanded to 7.1 MB, which is faster on a CPU"),
        (("--expand-weights",), "expanded to 7.1 MB"),
        (("--no-expand-weights",), "stay quantized"),
    ],
    ids=["auto", "expanded", "quantized"],
)
def test_one_line_says_what_was_chosen(
    flags: tuple[str, ...], line: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "py-llama-draft: " not in run(*ARGUMENTS, *flags).err
    monkeypatch.setattr(number_format, "NOTED_ABOVE", 1)
    done = run(*ARGUMENTS, *flags)
    assert done.code == 0
    [output] = [each for each in done.err.splitlines() if each.startswith("py-llama-draft: ")]
    assert line in output
    assert run(*ARGUMENTS, *flags, "--quiet").err == ""
    assert json.loads(run(*ARGUMENTS, *flags, "--json").out)["text"]


# A prompt longer than what a T5 was trained on is read, with a word about it.


@pytest.mark.filterwarnings("default")
def test_a_prompt_beyond_what_the_model_saw_is_read_with_one_line(
    run: Run, t5: Path, tmp_path: Path
) -> None:
    short = Path(shutil.copytree(t5, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "n_positions": 8}))
    arguments = ("generate", "Les pates, " * 9, "--draft-model", short, "-m", 9, "--quiet")
    usual = run(*arguments, "--model", t5)
    output = run(*arguments, "--model", short)
    assert (output.code, output.out) == (0, usual.out) and usual.err == ""
    assert re.fullmatch(
        r"warning: the prompt has \d+ tokens, and the model was trained on 8 at most: the text may "
        r"be worse, and reading the prompt takes about [\d.]+ [kM]B of memory\n",
        output.err,
    )


@pytest.mark.filterwarnings("default")
def test_a_prompt_beyond_the_memory_is_refused_before_it_is_read(
    run: Run, t5: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 20 million tokens are for any machine; of a batch one line is an error."""
    memory = (t5 / "model.safetensors").stat().st_size + 50_000_000
    monkeypatch.setattr("mlx_specdec.checkpoints.disk.memory", lambda: memory)
    long = "Les pates, " * 20_000
    fails(
        run("generate", long, "--model", t5),
        "the prompt has",
        "reading the prompt takes about",
        f"models may take {sizes.show(int(0.9 * memory))} on this machine: shorten it",
    )
    file = write(tmp_path / "in.txt", ["les pates", long])
    done = run("batch", file, "-o", output, "--model", t5, "-m", 3)
    assert done.code == 1
    first, second = records(output)
    assert "text" in first and "shorten it" in second["error"]
