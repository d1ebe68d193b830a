"""`batch`: each completion is what its prompt becomes alone, whatever ends the run."""

import functools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from .support import Outcome, checkpoint, command, moved
from .translators import translator

WORDS = ["les", "pates", "a", "midi", "cuire", "deux", "oeufs", "dans", "une", "grande"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDLESS = ("--logit-bias", "1=-1e9")
OPTIONS: dict[str, Any] = {"max_tokens": 6, "cost_cache": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """A family -> its target, and a draft for the translator."""
    place = tmp_path_factory.mktemp("models")
    t5, llama = translator(place / "t5"), checkpoint(place / "llama", template=TEMPLATE)
    turns = checkpoint(place / "recurrent", "recurrent_gemma")
    return {"t5": [t5, moved(t5, place / "draft")], "llama": [llama], "recurrent": [turns]}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "out.jsonl"


@functools.cache
def loaded(*models: Path) -> Any:
    return load(*models)


def sentences(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


def batch(models: Sequence[Path], rows: Sequence[object], output: Path, *flags: object) -> Outcome:
    """Run `batch` over these rows: texts, or objects that are written as JSON."""
    file = output.parent.parent / "in.txt"
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_bytes("".join(f"{text}\n" for text in texts).encode())
    pair = [
        *("--model", models[0]),
        *(word for draft in models[1:] for word in ("--draft-model", draft)),
    ]
    return command("batch", file, "--output", output, *pair, "-m", 6, "--no-cost-cache", *flags)


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def left_in(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@pytest.mark.parametrize(
    ("family", "flags", "options"),
    [
        ("t5", (), {}),
        ("t5", ("--temperature", 0.9, "--seed", 4), {"temperature": 0.9, "seed": 4}),
        ("t5", ("--batch-size", 1), {}),
        (
            "t5",
            ("--temp", 0.9, "--rule", "token", "--num-draft", 2),
            {"temperature": 0.9, "rule": "token", "num_draft": 2},
        ),
        ("llama", ("--stop", "e", "--proposer", "ngram"), {"stop": "e", "proposer": "ngram"}),
        ("llama", ("--batch-size", 3, "--regular-decode"), {"regular": True}),
        ("recurrent", (), {}),
    ],
)
def test_each_completion_is_that_of_its_prompt_alone(
    models: dict[str, list[Path]],
    output: Path,
    family: str,
    flags: tuple[object, ...],
    options: dict[str, Any],
) -> None:
    prompts = sentences(5)
    done = batch(models[family], prompts, output, *flags)
    assert (done.code, done.out) == (0, "") and left_in(output.parent) == ["out.jsonl"]
    pair = loaded(*models[family])
    wanted = [generate(pair, prompt, Options(**OPTIONS, **options)) for prompt in prompts]
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
    in_turns = (
        f"one text at a time: {models[family][0]} cannot take several sequences in one pass: "
    )
    assert (in_turns in done.err) == (family == "recurrent")


@pytest.mark.parametrize("lines", [1, 2])
def test_a_completion_is_drafted_from_those_before_it(
    models: dict[str, list[Path]], output: Path, lines: int
) -> None:
    drafting = ("--proposer", "ngram", "--num-draft", 8, "--batch-size", 1, "-m", 60)
    done = batch(models["llama"], ["def read_lines"] * lines, output, *drafting)
    [accepted] = re.findall(r"(\d+) of \d+ draft tokens accepted", done.err)
    assert (int(accepted) > 30) == (lines > 1)


def test_lines_have_names_and_settings_of_their_own(
    models: dict[str, list[Path]], output: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "les pates", "id": "first"},
        {"prompt": "a midi", "max_tokens": 3, "id": 0},
        {"prompt": "a midi", "id": 3, "temperature": 0.9, "seed": 5, "top_p": 0.8},
        {"prompt": "deux oeufs", "stop": ["e", "a"], "comment": "kept out"},
        {"prompt": "deux oeufs", "max_tokens": 0},
    ]
    assert batch(models["t5"], rows, output, *ENDLESS).code == 0
    pair, found = loaded(*models["t5"]), records(output)
    for row, record in zip(rows, found, strict=True):
        own = {name: row[name] for name in row if name not in ("prompt", "id", "comment")}
        options = Options(**{**OPTIONS, "logit_bias": {1: -1e9}, **own})
        alone = generate(pair, row["prompt"], options)
        assert (record["text"], record["seed"]) == (alone.text, options.seed)
        assert record.get("id") == row.get("id")
    assert [record["generated_tokens"] for record in found[:3]] == [6, 3, 6]


def test_text_has_a_line_for_each_line_and_a_dash_is_standard_output(
    models: dict[str, list[Path]], output: Path
) -> None:
    rows = ["\ufeffles pates\r", "\r", "a midi", "deux\\noeufs"]
    assert batch(models["t5"], rows, output).code == 0
    texts = {record["line"]: record["text"] for record in records(output)}
    assert sorted(texts) == [1, 3, 4]
    pair = loaded(*models["t5"])
    assert texts[4] == generate(pair, "deux\noeufs", Options(**OPTIONS)).text
    for flags in ((), ("--text",)):
        assert batch(models["t5"], rows, output, *flags, "--overwrite").code == 0
        file = output.parent.parent / "in.txt"
        pair_flags = ("--model", models["t5"][0], "--draft-model", models["t5"][1], "-m", 6)
        done = command("batch", file, "-o", "-", *pair_flags, "--no-cost-cache", *flags, "--quiet")
        assert (done.code, done.err) == (0, "")
        assert done.out.encode() == output.read_bytes()
    shown = [text.replace("\r", "\\r").replace("\n", "\\n") for text in texts.values()]
    assert done.out.split("\n") == [shown[0], "", *shown[1:], ""]
    assert left_in(output.parent) == ["out.jsonl"]
