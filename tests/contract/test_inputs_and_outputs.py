"""Files that a command reads are never replaced by what it writes, and nothing is half-written."""

import os
from pathlib import Path

import pytest

from .interruption import full_disk
from .support import Outcome, checkpoint, command

PROMPTS = "def f(x):\nimport os\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = Path("prompts.txt")
    file.write_text(PROMPTS)
    return file


def unchanged(done: Outcome, source: str, flag: str) -> None:
    done.refuses(f"{source} is read and cannot be overwritten", flag)
    assert Path("prompts.txt").read_text() == PROMPTS
    assert not list(Path().glob("*.partial"))


@pytest.mark.parametrize("spelling", ["prompts.txt", "./prompts.txt", "dir/../prompts.txt", "link"])
def test_batch_does_not_replace_its_prompts(spelling: str) -> None:
    Path("dir").mkdir()
    Path("link").symlink_to("prompts.txt")
    done = command("batch", "prompts.txt", "--output", spelling, "--overwrite")
    unchanged(done, "prompts.txt", "--output")
    done = command("batch", spelling, "--output", "prompts.txt", "--overwrite", "--text")
    unchanged(done, str(Path(spelling)), "--output")


def test_batch_does_not_replace_its_prompts_by_a_file_beside_the_output() -> None:
    os.link("prompts.txt", "out.partial")
    done = command("batch", "out.partial", "-o", "out", "--overwrite")
    done.refuses("out.partial is read and cannot be overwritten", "--output")
    assert Path("out.partial").read_text() == PROMPTS


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar", "--lookup-file", "--model"])
def test_batch_does_not_replace_what_a_flag_names(flag: str) -> None:
    Path("read").write_text('{"type": "object"}')
    done = command("batch", "prompts.txt", "-o", "read", "--overwrite", flag, "read")
    unchanged(done, "read", "--output")
    assert Path("read").read_text() == '{"type": "object"}'


@pytest.mark.parametrize("name", ["train-medusa", "train-draft"])
def test_training_asks_nobody_to_delete_what_it_reads(name: str, model: Path) -> None:
    rest = ("--layers", 1) if name == "train-draft" else ()
    arguments = (name, "--model", model, "--data", "prompts.txt", *rest)
    unchanged(command(*arguments, "--output", "./prompts.txt"), "prompts.txt", "--output")
    command(*arguments, "--output", model).refuses(f"{model} is read and cannot be overwritten")
    assert (model / "config.json").is_file()


def test_a_conversation_that_cannot_be_saved_leaves_the_old_file(model: Path) -> None:
    Path("old.json").write_text("old")
    with full_disk():
        done = command(
            *("chat", "--model", model, "--no-cost-cache"), stdin="/save old.json\n/save new.json\n"
        )
    assert "cannot write old.json" in done.err and "cannot write new.json" in done.err
    assert Path("old.json").read_text() == "old"
    assert sorted(file.name for file in Path().iterdir()) == ["old.json", "prompts.txt"]
