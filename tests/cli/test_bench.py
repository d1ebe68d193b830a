"""The bench command: what it measures, checks, prints and writes, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.cli import bench
from mlx_specdec.cli.bench import sample
from mlx_specdec.measure.figures import Analysis, Figures

from ..support.bench_samples import setting
from ..support.commands import Run, Terminal, fails, strict
from ..support.models import make_llama


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"category": "short", "prompt": "translate English to French: Good morning."},
        {"category": "long", "prompt": "translate English to French: Where is the tea?"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_every_method_is_measured_and_its_text_compared(
    run: Run, t5: Path, t5_draft: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = (
        "bench",
        prompts,
        "--model",
        t5,
        "--draft-model",
        t5_draft,
        "--num-draft",
        "2,auto",
    )
    done = run(*arguments, "--repeats", 1, "-m", 12, "--json")
    assert done.code == 0
    found = strict(done.out)
    names = [method["name"] for method in found["methods"]]
    assert names == ["plain", "draft 2", "draft auto", "auto"]
    speculative = found["methods"][1]
    assert speculative["texts"] == speculative["compared"] == 2
    assert speculative["differences"] == [] and speculative["speed_up"] > 0
    assert set(speculative["by_category"]) == {"short", "long"}
    assert "draft 2" in done.err


def test_what_the_chat_template_gets_counts_for_every_method(run: Run, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}{{ end }}"
    named = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    model, file = make_llama(tmp_path, **named), tmp_path / "prompts.txt"
    file.write_text("def read(path):\n", encoding="utf-8")
    arguments = (
        "bench",
        file,
        "--model",
        model,
        "--num-draft",
        3,
        "--repeats",
        1,
        "-m",
        4,
        "--json",
    )
    done = run(*arguments, "--system-prompt", "be brief", "--chat-template-config", '{"end": "!"}')
    assert done.code == 0, done.err
    assert strict(done.out)["methods"][1]["differences"] == []


def test_what_cannot_be_measured_is_reported(
    run: Run, t5: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = ("bench", prompts, "--model", t5)
    fails(run(*arguments, "--num-draft", "1,many"), "many")
    fails(run(*arguments, "--repeats", 0), "--repeats", "greater than or equal to 1")
    fails(run(*arguments, "--max-tokens", 0), "max-tokens must be 1 or more")
    fails(run("bench", tmp_path / "none.txt", "--model", t5), "none.txt")
    fails(run("bench", "--model", t5), "prompts")
    fails(run(*arguments, "--proposer", "draft"), "draft-model")


def test_throughput_is_measured_at_every_batch_size(
    run: Run, t5: Path, t5_draft: Path, prompts: Path
) -> None:
    arguments = (
        "bench",
        prompts,
        "--model",
        t5,
        "--draft-model",
        t5_draft,
        "--batch-size",
        "4, 2,4",
    )
    more = ("--repeats", 1, "-m", 12, "--num-draft", 2, "--proposer", "draft")
    done = run(*arguments, *more, "--json")
    assert done.code == 0
    measured = strict(done.out)
    assert [method["name"] for method in measured["methods"]] == [
        "plain, batch 1",
        "plain, batch 2",
        "draft 2, batch 2",
        "plain, batch 4",
        "draft 2, batch 4",
    ]
    assert measured["texts"] == 2
    for method in measured["methods"]:
        assert (method["compared"], method["differences"]) == (2, [])
        assert method["tokens_per_second"] > 0 and method["peak_memory_bytes"] > 0
    assert "draft 2, batch 4" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch-size", "0"), "batch-size must look like 1,4,16; '0' is no number"),
        (("--batch-size", "1,many"), "'many' is no number"),
        (("--batch-size", "1,,4"), "'' is no number"),
        (("--batch-size", "4", "--num-draft", "1,2"), "name one length in --num-draft"),
        (("--batch-size", "4", "--proposer", "ngram", "--proposer", "draft"), "one --proposer"),
        (("--batch-size", "4", "--proposer", "draft"), "draft-model"),
    ],
)
def test_throughput_that_cannot_be_measured_is_reported(
    run: Run, t5: Path, prompts: Path, arguments: tuple[str, ...], says: str
) -> None:
    fails(run("bench", prompts, "--model", t5, *arguments), says)


@pytest.mark.parametrize("name", ["t5-enfr", "t5-enfr-medusa", "py-llama", "py-llama-medusa"])
def test_every_shipped_target_has_sample_prompts(name: str) -> None:
    assert sample(f"weights/{name}").is_file()


# The table of bench: no name is cut, however narrow the terminal.


NAMES = ("plain", "draft auto", "mlx-lm draft 3", "transformers draft 8")


def figures(name: str) -> Figures:
    family, length = name.split()[0], name.split()[-1]
    num_draft: Any = int(length) if length.isdecimal() else length
    num_draft = 0 if length == "plain" else num_draft
    return Figures(
        *(name, family, num_draft, 30, 201.2, 1.5, (1.25, 1.75), {}, 1.91, 0.5, (), 90, ())
    )


def table(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    """As a terminal of so many columns shows it, without styles."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    methods = tuple(figures(name) for name in NAMES)
    analysis = Analysis(methods, 30, 3, {}, False)
    chosen = setting(model="t5", draft_model=None, blas="mkl")
    terminal = Terminal()
    bench.show(analysis, chosen, terminal)
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("columns", [45, 60, 80, 100, 120])
def test_no_name_and_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    shown = table(monkeypatch, columns)
    assert "…" not in shown
    lines = shown.splitlines()
    rule = next(at for at, line in enumerate(lines) if "──" in line)
    [top] = [at for at, line in enumerate(lines[:rule]) if not line.strip()]
    assert rule - top - 1 <= 2, "the header has more than two rows"
    assert max(map(len, shown.splitlines())) <= columns
    for name in NAMES:
        rows = [line for line in shown.splitlines() if "201.2" in line]
        (row,) = [line for line in rows if line.strip().startswith(name)]
        assert "1.50" in row or name == "plain"
    assert "draft auto is fastest: 1.50 times plain decoding." in " ".join(shown.split())
