"""`batch` goes on where an interrupted run was, and touches nobody else's files."""

import fcntl
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from .interruption import full_disk, interrupted
from .support import Outcome, checkpoint, command, moved

LINES = 6
PROMPTS = "".join(f"{'def read ' * (number % 4)}lines {number}\n" for number in range(LINES))
Words = tuple[object, ...]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """A pair and the settings of all runs."""
    place = tmp_path_factory.mktemp("models")
    target = checkpoint(place / "target")
    pair = ("--model", target, "--draft-model", moved(target, place / "draft", 0.02))
    return (*pair, "-m", 5, "--temp", 0.8, "--num-draft", 2, "--no-cost-cache")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with nothing but the prompts."""
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text(PROMPTS)


def batch(words: Words, *flags: object, output: str = "out") -> Outcome:
    return command("batch", "in.txt", "-o", output, *words, "--batch-size", 4, *flags)


def files() -> list[str]:
    return sorted(file.name for file in Path().iterdir() if file.name != "in.txt")


def has_results(count: int) -> Callable[[int], bool]:
    """Return a function that tells whether the unfinished run has at least this many results."""

    def has(asked: int) -> bool:
        file = Path("out.partial")
        return file.exists() and file.read_bytes().count(b"\n") > count

    return has


@dataclass(frozen=True)
class Runs:
    """The output of a whole run, and what a run has left that was interrupted after `done`
    results."""

    output: bytes
    left: bytes
    done: int


@pytest.fixture(scope="module")
def runs(words: Words, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        Path("in.txt").write_text(PROMPTS)
        with interrupted(has_results(3)):
            assert batch(words).code == 130
        left = Path("out.partial").read_bytes()
        Path("out.partial").unlink()
        assert batch(words).code == 0
        return Runs(Path("out").read_bytes(), left, left.count(b"\n") - 1)


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupted_run_goes_on_with_the_same_bytes(
    words: Words, runs: Runs, count: int
) -> None:
    with interrupted(has_results(count)):
        done = batch(words)
    assert done.code == 130 and files() == ["out.partial"]
    [found] = re.findall(rf"interrupted: (\d+) of {LINES} texts are in out.partial; ", done.err)
    assert "the same command goes on from here" in done.err and count <= int(found)
    assert Path("out.partial").read_bytes().count(b"\n") == int(found) + 1
    done = batch(words, "--batch-size", 3)
    assert done.code == 0 and f"going on: {found} of {LINES} texts are there" in done.err
    assert f"\n{LINES - int(found)} texts, " in done.err
    assert Path("out").read_bytes() == runs.output and files() == ["out"]


def test_a_run_that_was_cut_off_anywhere_goes_on(words: Words, runs: Runs) -> None:
    header, last = runs.left.index(b"\n") + 1, runs.left.rindex(b"\n", 0, -1) + 1
    assert header < last
    for length in (0, header + 1, last - 1, len(runs.left) - 1):
        Path("out.partial").write_bytes(runs.left[:length])
        done = batch(words)
        complete = max(0, runs.left[:length].count(b"\n") - 1)
        assert (f"going on: {complete} of" in done.err) == (complete > 0)
        assert Path("out").read_bytes() == runs.output and files() == ["out"]
        Path("out").unlink()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--seed", 1), "with --seed 0, not 1"),
        (("--stop", "é"), 'with --stop unset, not ["é"]'),
        (("--top-k", 3), "with --top-k unset, not 3"),
        (("--temp", 0), "with --temperature 0.8, not 0.0"),
        ((), "over another input (in.txt)"),
    ],
)
def test_what_another_run_left_is_named_and_kept(
    words: Words, runs: Runs, flags: Words, part: str
) -> None:
    Path("out.partial").write_bytes(runs.left)
    if not flags:
        Path("in.txt").write_text("another prompt\n")
    batch(words, *flags).refuses(part, "--overwrite")
    assert Path("out.partial").read_bytes() == runs.left
    if not flags:
        done = batch(words, "--overwrite")
        assert done.code == 0 and "going on" not in done.err and files() == ["out"]


@pytest.mark.parametrize(
    "content", [b"my notes\n", b"{}\n", b'{"format": "mlx-specdec batch 2"', b"\xff\n", b"[1]\n"]
)
def test_a_file_of_somebody_else_is_never_taken_for_the_rest_of_a_run(
    words: Words, content: bytes
) -> None:
    Path("out.partial").write_bytes(content)
    for flags in ((), ("--overwrite",)):
        done = batch(words, *flags)
        done.refuses("out.partial was not left by a run of this program: move it away")
    assert Path("out.partial").read_bytes() == content


def test_one_run_at_a_time_writes_an_output(words: Words, runs: Runs) -> None:
    Path("out.partial").write_bytes(runs.left)
    with Path("out.partial").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        batch(words).refuses("another run is writing out: wait until it has ended")
    assert batch(words).code == 0 and Path("out").read_bytes() == runs.output


def test_a_full_disk_costs_the_unfinished_line_alone(words: Words, runs: Runs) -> None:
    Path("out.partial").write_bytes(runs.left)
    with full_disk(len(runs.left) + 5):
        batch(words, "--quiet").refuses("out cannot be written: ", "goes on from here")
    assert Path("out.partial").read_bytes()[:-5] == runs.left
    done = batch(words)
    assert done.code == 0 and f"going on: {runs.done} of {LINES}" in done.err
    assert Path("out").read_bytes() == runs.output


def test_a_finished_output_is_kept_unless_overwritten(words: Words, runs: Runs) -> None:
    Path("out").write_bytes(b"finished")
    batch(words).refuses("out exists: give --overwrite")
    assert Path("out").read_bytes() == b"finished"
    assert batch(words, "--overwrite").code == 0 and Path("out").read_bytes() == runs.output
