"""README.md and docs/: their links lead somewhere, and their commands and their Python run."""

import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from mlx_specdec.cli.app import app

from .contract.support import command
from .support.shipped import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "weights" / "README.md", ROOT / "CONTRIBUTING.md"]
MADE = re.compile(r"^(?:\$ )?((?:printf|echo) .* >\S+)", re.M)
"""A line that makes a file, for the commands after it in its block."""
ELSEWHERE = {
    *("hosts.json", "config.yaml"),  # the reader's own
    "cache/SmolLM2-135M-Instruct.Q4_1.gguf",  # scripts/real_models.sh downloads it
    "provenance.json",  # in the program's output
}
"""Names in blocks of commands that are no files of a clone."""
LONG = {"serve", "chat", "launch", "bench", "pairs", "estimate", "train-draft", "train-medusa"}
"""Commands that do not end by themselves, or take long; tests of their own run them."""


def blocks(page: Path) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)
    return [block for language, block in found if language in ("", "bash", "sh", "console")]


def commands(page: Path) -> list[list[str]]:
    """The words of each line of a page's blocks that runs the program, from the command's name."""
    found = []
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if not _RUNS.match(line):
                continue
            bare = line.removeprefix("$ ").removeprefix(".venv/bin/")
            words = shlex.split(bare, comments=True)
            if words[0] == "python":
                words = [{"main.py": "generate", "convert.py": "convert"}[words[1]], *words[2:]]
            elif words[0] == "uvx":
                words = ["generate", *words[words.index("mlx-specdec") + 1 :]]
            found.append(words[words[0] == "mlx-specdec" :])
    return [words for words in found if not words[0].startswith("-")]


_RUNS = re.compile(r"(\$ )?((\.venv/bin/)?mlx-specdec|python (main|convert)\.py|uvx) ")
ALL = [(page, words) for page in PAGES + OTHERS for words in commands(page)]


def runs_here(words: list[str]) -> bool:
    """Whether a command needs nothing but the models in weights/ and files that its page makes."""
    named = [word for flag, word in itertools.pairwise(words) if flag.endswith("model")]
    return words[0] not in LONG and all((ROOT / name / "config.json").exists() for name in named)


def parsed(words: list[str]) -> None:
    """Parse a command as the program does, without running it."""
    program = get_command(app)
    context = program.make_context("mlx-specdec", list(words), resilient_parsing=False)
    name, command, rest = program.resolve_command(context, list(words))  # type: ignore[attr-defined]
    command.make_context(name, rest, parent=context)
    if "--" in words:
        parsed(words[words.index("--") + 1 :])


def test_the_pages_are_short() -> None:
    pages = [page.read_text("utf-8") for page in PAGES]
    assert pages[0].count("\n") <= 100 and sum(len(page.split()) for page in pages[1:]) <= 19_500


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert {page.name for page in PAGES[1:]} - {"README.md"} == set(
        re.findall(r"\((\w[\w-]*\.md)", index)
    )


@pytest.mark.parametrize(
    "page",
    [*PAGES, *OTHERS, ROOT / "benchmarks" / "NOTES.md"],
    ids=lambda page: page.name,
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" not in link:
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            titles = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M) if heading else []
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in anchors, link


@pytest.mark.parametrize("words", [words for _, words in ALL], ids=lambda words: " ".join(words))
def test_commands_are_understood(words: list[str]) -> None:
    parsed(words)


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=lambda page: page.name)
def test_commands_in_sentences_are_understood(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M)
    for line in re.findall(r"`mlx-specdec ([a-z][\w-]*\s[^`]+)`", text):
        parsed(shlex.split(line.replace("\n", " ")))


def test_every_flag_is_explained() -> None:
    """Names of other programs do not count, and neither do --version and the page on upgrading."""
    text = "".join(page.read_text("utf-8") for page in PAGES[1:] if page.name != "upgrading.md")
    program = get_command(app)
    for name, one in program.commands.items():  # type: ignore[attr-defined]
        for flag in one.params:
            names = [*flag.opts, *flag.secondary_opts]
            found = any(re.search(rf"(?<![\w-]){word}(?![\w-])", text) for word in names)
            assert found or flag.name == "version" or names[0][0] != "-", (name, names)


def test_many_commands_are_looked_at() -> None:
    assert len(ALL) > 30 and sum(runs_here(words) for _, words in ALL) > 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_in_commands_are_in_a_clone_or_made_before(page: Path) -> None:
    for block in blocks(page):
        block = re.sub(r" #.*", "", block)
        made = {*re.findall(r"(?: >|--output |--plot )(\S+)", block), *ELSEWHERE}
        for name in re.findall(r"[\w./-]+\.(?:txt|jsonl?|lark|gguf|toml|cfg|yaml|sh)\b", block):
            assert name in made or (ROOT / name).exists(), name


@pytest.mark.parametrize(
    ("page", "words"),
    [(page, words) for page, words in ALL if runs_here(words)],
    ids=lambda part: part.name if isinstance(part, Path) else " ".join(part),
)
def test_commands_on_shipped_models_run(
    page: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--json-schema" in words:
        pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    monkeypatch.chdir(tmp_path)
    for line in MADE.findall("\n".join(blocks(page))):
        subprocess.run(["bash", "-c", line], check=True)
    for name in ("weights", "prompts"):
        Path(name).symlink_to(ROOT / name)
    if words[0] in ("generate", "batch"):
        words = [*words, "--max-tokens", "3"]
    outcome = command(*words)
    assert outcome.code == 0, outcome.err
    assert outcome.out or words[0] in ("batch", "convert")


def test_the_readmes_python_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(README.read_text("utf-8").split("```python\n")[1].split("```")[0], {})
    assert len(capsys.readouterr().out) > 3


CHAT_MODEL = "cache/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model of the chat example, which tests do not download. A shipped model with a chat template
takes its place, and its output is not compared."""


def test_the_python_page_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    stand_in = tmp_path / CHAT_MODEL
    shutil.copytree(ROOT / "weights" / "py-llama", stand_in)
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (stand_in / "chat_template.jinja").write_text(template, "utf-8")
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    monkeypatch.chdir(tmp_path)
    page, names = (ROOT / "docs" / "python.md").read_text("utf-8"), {}
    examples = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", page, re.S)
    assert len(examples) == page.count("```python") == 10
    for code, output in examples:
        exec(code, names)
        printed = capsys.readouterr().out
        assert printed == output or (CHAT_MODEL in code and printed)
