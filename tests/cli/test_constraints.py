"""Constraints on the command line: texts that fit, and one line for what is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_specdec import process

from ..support.commands import Run, fails, records, strict, write

SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
NOWHERE = ("--model", "no/such-model-directory")


def file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "asked").write_text(text, encoding="utf-8")
    return tmp_path / "asked"


def test_texts_fit(run: Run, llama: Path, tmp_path: Path) -> None:
    model = ("-p", "Les pates", "--model", llama, "--no-cache")
    grammar = 'start: "(" (start | "e") ")"'
    for flags, pattern in [
        (("--json-schema", file(tmp_path, SCHEMA)), r'\{"a": [12]\}'),
        (("--json-schema", f" {SCHEMA} "), r'\{"a": [12]\}'),
        (("--regex", "[ab]{3}é"), "[ab]{3}é"),
        (("--grammar", write(tmp_path / "g", [grammar]), "--seed", 2), r"\(+e\)+|\(+"),
    ]:
        for more in ((), ("--num-draft", 3), ("--temp", 1.0), ("--regular-decode",)):
            outcome = run("generate", *model, "--quiet", *flags, *more)
            assert (outcome.code, outcome.err) == (0, "")
            assert re.fullmatch(pattern, outcome.out.removesuffix("\n")), outcome.out
    output = strict(run("generate", *model, "--json", "--regex", "abcabcab", "--speculate", 4).out)
    assert output["text"] == "abcabcab"
    assert output["stats"]["by_source"]["forced"]["accepted"] > 0


def test_every_text_of_a_batch_fits_and_another_schema_is_another_run(
    run: Run, t5: Path, tmp_path: Path, output: Path
) -> None:
    prompts = write(tmp_path / "in.txt", ["les pates", "deux oeufs", "midi"])
    command = ("batch", prompts, "-o", output, "--model", t5, "--quiet")
    schema = file(tmp_path, SCHEMA)
    assert run(*command, "--json-schema", schema).code == 0
    assert {strict(each["text"])["a"] for each in records(output)} <= {1, 2}
    output.unlink()
    assert run(*command, "--json-schema", schema, "--batch-size", "1").code == 0
    for line in records(output):
        assert set(strict(line["text"])) == {"a"}


def test_a_journal_of_another_schema_is_not_gone_on_with(
    run: Run, t5: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_specdec.cli.batch_files import Journal

    prompts = write(tmp_path / "in.txt", ["les pates", "deux oeufs"])
    command = ("batch", prompts, "-o", output, "--model", t5, "--quiet")

    def interrupted(self: Journal, *, as_text: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", interrupted)
        assert run(*command, "--json-schema", file(tmp_path, SCHEMA)).code == 130
    changed = file(tmp_path, SCHEMA.replace("1, 2", "3"))
    refused = run(*command, "--json-schema", changed)
    assert refused.code == 2 and "json-schema" in refused.err and len(refused.err) < 600


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--json-schema", "{", "json-schema is no JSON"),
        ("--json-schema", "[1]", "json-schema must be a JSON object"),
        ("--json-schema", '{"type": "strin"}', "Invalid type: strin"),
        ("--json-schema", '{"$ref": "http://localhost/x"}', "does not fetch resources"),
        ("--json-schema", '{"items":' * 20000, "too many brackets in each other"),
        ("--json-schema", "1" * 300_000, "more than 262144 characters"),
        ("--grammar", "", "grammar is empty"),
        ("--grammar", "root ::= x", "Rule 'x' not found"),
        ("--grammar", "start: " + "(" * 9999, "too deeply nested"),
        ("--regex", "a(", "unclosed group"),
        ("--regex", "", "regex is empty"),
        ("--regex", "\udcff", "half a character"),
    ],
)
def test_what_is_wrong_is_reported_in_a_line_before_anything_is_loaded(
    run: Run, tmp_path: Path, flag: str, text: str, said: str
) -> None:
    given = text if flag == "--regex" else file(tmp_path, text)
    fails(run("generate", "-p", "x", *NOWHERE, flag, given), said)


def test_files_that_cannot_be_read_and_contradictions_are_reported_in_a_line(
    run: Run, tmp_path: Path
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for flags, said in [
        (("--json-schema", tmp_path / "none"), "there is no file"),
        (("--grammar", tmp_path), "Is a directory"),
        (("--json-schema", binary), "is not UTF-8 text"),
        (("--regex", "a", "--grammar", file(tmp_path, 'start: "a"')), "regex and grammar cannot"),
    ]:
        fails(run("generate", "-p", "x", *NOWHERE, *flags), said)


def test_what_a_models_vocabulary_cannot_write_is_refused(run: Run, tmp_path: Path) -> None:
    """The shipped translator's has no braces, and no letters but French and English ones."""
    translator = ("generate", "-p", "translate English to French: I am cold.", "--quiet")
    first = run(*translator, "--json-schema", file(tmp_path, SCHEMA))
    fails(first, "its vocabulary has no token that may come first")
    later = run(*translator, "--regex", "Je suis 日本", "--no-cache")
    assert later.code == 2 and "the model has no token for what must follow" in later.err
    fits = run(*translator, "--regex", "(Je|Il) [a-z ]+froid\\.", "--no-cache")
    assert fits.code == 0 and re.fullmatch(r"(Je|Il) [a-z ]+froid\.\n", fits.out)


def test_a_missing_extra_is_reported_in_a_line() -> None:
    script = (
        "import sys\n"
        "sys.modules['llguidance'] = None\n"
        "from mlx_specdec.cli.app import generate, run_one\n"
        f"sys.argv = ['main.py', '-p', 'x', '--regex', 'a', *{NOWHERE!r}]\n"
        "run_one(generate)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and process.install("grammar") in done.stderr
