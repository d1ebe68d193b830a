"""The batch command: what comes out is what each prompt becomes alone, whatever ends the run."""

import re
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load
from mlx_specdec.cli import render
from mlx_specdec.cli.batch_files import Journal
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support import tiny
from ..support.commands import ENDLESS, Run, fails, left_in, records, sentences, write
from ..support.models import make_llama
from ..support.tokenizers import byte_level


@pytest.mark.parametrize("lines", [1, 2])
def test_a_text_is_drafted_from_those_before_it(
    run: Run, llama: Path, tmp_path: Path, output: Path, lines: int
) -> None:
    file = write(tmp_path / "in.txt", ["def read_lines"] * lines)
    drafting = ("--proposer", "ngram", "--num-draft", 8, "--batch-size", 1)
    done = run("batch", file, "--output", output, "--model", llama, "-m", 60, *drafting)
    [accepted] = re.findall(r"(\d+) of \d+ draft tokens accepted", done.err)
    assert (int(accepted) > 30) == (lines > 1)


@pytest.mark.parametrize(
    ("kind", "flags", "settings"),
    [
        ("t5", (), {}),
        ("t5", ("--temperature", 0.9, "--seed", 4), {"temperature": 0.9, "seed": 4}),
        ("t5", ("--batch-size", 1), {}),
        ("t5", ("--temp", 0.9, "--rule", "token", "--num-draft", 2), {"rule": "token"}),
        ("llama", ("--stop", "e", "--proposer", "ngram"), {"stop": "e", "proposer": "ngram"}),
        ("llama", ("--batch-size", 3, "--regular-decode"), {"regular": True}),
    ],
)
def test_each_text_is_that_of_its_prompt_alone(
    run: Run,
    tmp_path: Path,
    output: Path,
    kind: str,
    flags: tuple[object, ...],
    settings: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    model = request.getfixturevalue(kind)
    draft = ("--draft-model", request.getfixturevalue("t5_draft")) if kind == "t5" else ()
    prompts = sentences(7)
    file = write(tmp_path / "in.txt", prompts)
    done = run("batch", file, "--output", output, "--model", model, *draft, "-m", 9, *flags)
    assert (done.code, done.out) == (0, "") and left_in(output.parent) == ["out.jsonl"]
    if settings.get("rule") == "token":
        settings = {"temperature": 0.9, "rule": "token", "num_draft": 2}
    pair = load(model, *draft[1:])
    wanted = [generate(pair, prompt, Options(max_tokens=9, **settings)) for prompt in prompts]
    assert records(output) == [
        {
            "line": number,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.labels.prompt_tokens,
            "generated_tokens": len(result.tokens),
            "seed": result.labels.seed,
        }
        for number, result in enumerate(wanted, start=1)
    ]


def test_a_model_that_takes_one_sequence_a_pass_is_decoded_in_turns(
    run: Run, tmp_path: Path, output: Path
) -> None:
    directory = tmp_path / "recurrent"
    directory.mkdir()
    size = load_tokenizer(byte_level(directory), kind="decoder-only").size
    model, prompts = tiny.write("recurrent_gemma", directory, vocab_size=size), sentences(3)
    file = write(tmp_path / "in.txt", prompts)
    done = run("batch", file, "-o", output, "--model", model, "-m", 6)
    assert done.code == 0 and f"one text at a time: {model} cannot take several" in done.err
    assert "in one pass: the recurrent state of an empty sequence is not zero\n" in done.err
    pair = load(model)
    wanted = [generate(pair, prompt, Options(max_tokens=6)).text for prompt in prompts]
    assert [each["text"] for each in records(output)] == wanted


def test_lines_have_names_and_settings_of_their_own(
    run: Run, t5: Path, tmp_path: Path, output: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "les pates", "id": "first"},
        {"prompt": "a midi", "max_tokens": 3},
        {"prompt": "a midi", "id": 3, "temperature": 0.9, "seed": 5, "top_p": 0.8},
        {"prompt": "deux oeufs", "stop": ["e", "a"], "comment": "kept out"},
        {"prompt": "deux oeufs", "max_tokens": 0},
    ]
    file = write(tmp_path / "in.jsonl", rows)
    done = run("batch", file, "-o", output, "--model", t5, "-m", 8, *ENDLESS)
    assert done.code == 0
    pair, report = load(t5), records(output)
    for row, record in zip(rows, report, strict=True):
        own = {k: v for k, v in row.items() if k not in ("prompt", "id", "comment")}
        options = Options(**{"max_tokens": 8, "logit_bias": {1: -1e9}, **own})
        alone = generate(pair, row["prompt"], options)
        assert (record["text"], record["seed"]) == (alone.text, options.seed)
        assert record.get("id") == row.get("id")
    assert [each["generated_tokens"] for each in report[:3]] == [8, 3, 8]


def test_messages_go_through_the_chat_template(run: Run, tmp_path: Path, output: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    model = make_llama(tmp_path / "chat", chat_template=template)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "les pates"}]
    file = write(tmp_path / "in.jsonl", [{"messages": messages}, {"prompt": "les pates"}])
    assert run("batch", file, "-o", output, "--model", model, "-m", 5).code == 0
    pair = load(model)
    wanted = [generate(pair, one, Options(max_tokens=5)) for one in (messages, "les pates")]
    assert [each["text"] for each in records(output)] == [each.text for each in wanted]
    assert records(output)[0]["prompt_tokens"] > records(output)[1]["prompt_tokens"]


def test_text_has_a_line_for_each_line(run: Run, t5: Path, tmp_path: Path, output: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"\xef\xbb\xbfles pates\r\n\r\na midi\r\ndeux\\noeufs")
    arguments = ("batch", file, "--model", t5, "-m", 6)
    assert run(*arguments, "-o", output).code == 0
    texts = {each["line"]: each["text"] for each in records(output)}
    assert sorted(texts) == [1, 3, 4]
    assert texts[4] == generate(load(t5), "deux\noeufs", Options(max_tokens=6)).text
    assert run(*arguments, "-o", output.with_name("out.txt"), "--text").code == 0
    written = output.with_name("out.txt").read_text(encoding="utf-8")
    assert written.split("\n") == [texts[1], "", texts[3], texts[4], ""]


def test_a_dash_is_standard_output(
    run: Run, t5: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "in.txt", ["les pates", "a midi"])
    arguments = ("batch", file, "--model", t5, "-m", 6, "--quiet")
    for flags in ((), ("--text",)):
        assert run(*arguments, *flags, "-o", output, "--overwrite").code == 0
        done = run(*arguments, *flags, "-o", "-")
        assert (done.code, done.out) == (0, output.read_text(encoding="utf-8"))
    assert left_in(tmp_path) == ["in.txt", "results"]


BAD = [
    {"prompt": "les pates"},
    {"text": "no prompt"},
    "nonsense",
    {"prompt": "a midi", "temperature": -1, "id": "cold"},
    {"messages": [{"role": "user", "content": "no template"}]},
    {"prompt": "a midi"},
]


def test_bad_lines_become_errors_and_the_run_goes_on(
    run: Run, t5: Path, tmp_path: Path, output: Path
) -> None:
    file = write(tmp_path / "in.jsonl", BAD)
    done = run("batch", file, "-o", output, "--model", t5, "-m", 5)
    assert done.code == 1 and '4 of 6 lines gave no text: see "error" in' in done.err
    report = records(output)
    assert [each["line"] for each in report] == [1, 2, 3, 4, 5, 6]
    assert ["text" in each for each in report] == [True, *4 * [False], True]
    assert [each.get("id") for each in report if "id" in each] == ["cold"]
    for number, part in ((2, '"prompt"'), (3, "JSON"), (4, "temp"), (5, "chat")):
        assert part in report[number - 1]["error"]


def test_a_line_that_never_fits_into_memory_is_an_error_and_others_wait(
    run: Run, t5: Path, tmp_path: Path, output: Path
) -> None:
    records_of = [{"prompt": "a midi"}, {"prompt": "les pates " * 40}, {"prompt": "les"}]
    file = write(tmp_path / "in.jsonl", records_of)
    row = load(t5).target.cache_nbytes(10, 6)
    arguments = ("batch", file, "-o", output, "--model", t5, "-m", 5)
    done = run(*arguments, "--memory-budget", f"{3 * row // 2}B")
    assert done.code == 1
    assert ["text" in each for each in records(output)] == [True, False, True]
    assert "tokens, which take " in records(output)[1]["error"]
    assert run(*arguments, "--memory-budget", "0").code == 2


@pytest.mark.parametrize(("row", "part"), [(BAD[2], "not JSON"), (BAD[4], "no chat template")])
def test_strict_stops_at_once(
    run: Run, t5: Path, tmp_path: Path, output: Path, row: object, part: str
) -> None:
    file = write(tmp_path / "in.jsonl", [BAD[0], row, BAD[5]])
    arguments = ("batch", file, "-o", output, "--model", t5, "-m", 5)
    done = run(*arguments, "--strict", "--quiet")
    assert done.code == 2 and done.err.count("\n") == 1
    assert f"line 2 of {file}: " in done.err and part in done.err and not output.exists()
    # Without --strict the same run goes on, and with it what is there already counts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "finish", lambda *_, **__: None)
        assert run(*arguments).code == 1
    assert run(*arguments, "--strict").code == 2
    assert run(*arguments).code == 1 and len(records(output)) == 3


EARLY = [
    (("--batch-size", 0), "--batch-size must be 1 or more, not 0"),
    (("--batch-size", "many"), "--batch-size must be a number or auto"),
    (("--top-p", 0), "top-p must lie"),
    (("--lookup-file", __file__, "--proposer", "draft"), "--proposer ngram"),
    (("--kv-bits", 5), "kv-bits"),
    (("more",), "more"),
]
"""Refused before anything is loaded."""
LATE = [
    (("--system-prompt", "be brief"), "this model has none"),
    (("--chat-template-config", '{"a": 1}'), "this model has none"),
    (("--chat-template-config", '{"conversation": 1}'), "may not set conversation"),
    (("--extra-eos-token", "<|none|>"), "no token '<|none|>'"),
    (("--logit-bias", "1000000=1"), "there is no token 1000000"),
    (("--proposer", "medusa"), "medusa"),
    (("--adapter-path", "."), "adapter-path"),
]


@pytest.mark.parametrize(("flags", "part"), [*EARLY, *LATE])
def test_wrong_flags_are_named_before_anything_is_written(
    run: Run, t5: Path, tmp_path: Path, output: Path, flags: tuple[object, ...], part: str
) -> None:
    model = "/nowhere" if (flags, part) in EARLY else t5
    file = write(tmp_path / "in.txt", sentences(3))
    fails(run("batch", file, "-o", output, "--model", model, *flags), part)
    assert left_in(output.parent) == []


def test_a_finished_output_is_kept_unless_overwritten(
    run: Run, t5: Path, tmp_path: Path, output: Path
) -> None:
    file = write(tmp_path / "in.txt", sentences(3))
    arguments = ("batch", file, "-o", output, "--model", t5, "-m", 5)
    assert run(*arguments).code == 0
    before = output.read_bytes()
    done = run(*arguments)
    assert done.code == 2 and f"{output} exists: give --overwrite" in done.err
    assert run(*arguments, "--overwrite").code == 0 and output.read_bytes() == before
    done = run("batch", output, "-o", output, "--model", t5, "-m", 5)
    assert done.code == 2 and output.read_bytes() == before


# The batch command, ended early: the same command goes on, and ends with the same bytes.


def interrupt_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does, once this many results are written."""
    shipped = Journal.append

    def append(self: Journal, record: dict[str, Any]) -> None:
        shipped(self, record)
        if self.done == count:
            raise KeyboardInterrupt

    patch.setattr(Journal, "append", append)


@pytest.mark.parametrize("count", [1, 5, 11])
def test_an_interrupted_run_goes_on_with_the_same_bytes(
    run: Run, t5: Path, t5_draft: Path, tmp_path: Path, output: Path, count: int
) -> None:
    file = write(tmp_path / "in.txt", sentences(11))
    arguments = ("--model", t5, "--draft-model", t5_draft, "-m", 9, "--temp", 0.8)
    assert run("batch", file, "-o", tmp_path / "whole", *arguments).code == 0
    arguments = ("batch", file, "-o", output, *arguments)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(count, patch)
        done = run(*arguments, "--batch-size", 4)
    assert done.code == 130 and left_in(output.parent) == ["out.jsonl.partial"]
    assert f"interrupted: {count} of 11 texts are in" in done.err
    assert "the same command goes on from here" in done.err
    done = run(*arguments, "--top-k", 3)
    assert done.code == 2 and "with --top-k unset, not 3" in done.err
    done = run(*arguments, "--batch-size", 3)
    assert done.code == 0 and f"going on: {count} of 11 texts are there" in done.err
    assert f"\n{11 - count} texts, " in done.err
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert left_in(output.parent) == ["out.jsonl"]


def test_progress_has_one_count_and_quiet_shows_none(
    run: Run, llama: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a terminal, a line about progress appears after these seconds.
    monkeypatch.setattr(render, "A_LINE_AFTER", 0.0)
    file = write(tmp_path / "in.txt", ["def f"] * 4)
    arguments = ("batch", file, "-o", output, "--model", llama, "-m", 4, "--batch-size", 1)
    quiet = run(*arguments, "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    spoken = run(*arguments, "--overwrite").err
    assert re.search(r"^writing texts, \d+ tokens/s: [0-4] of 4$", spoken, re.MULTILINE), spoken
