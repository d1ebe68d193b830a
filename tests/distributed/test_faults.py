"""If one rank ends, all ranks end soon, with one line and an exit code in a file."""

import signal
import time
from pathlib import Path

import pytest

from ..support import loopback
from ..support.loopback import Ended, Ranks

pytestmark = pytest.mark.slow
SOON = 10.0
"""Seconds in which all have to end."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes without end."""
    return loopback.write("llama", tmp_path_factory.mktemp("models") / "target", eos_token_id=999)


def words(target: Path, *more: str, prompt: str = loopback.PROMPT) -> list[str]:
    """A command of rank 0 and of all others."""
    shared = ["--distributed", "tensor", "--model", str(target), "--no-cost-cache", *more]
    return ["-m", "mlx_specdec", "generate", *shared, prompt]


def errors(ended: list[Ended]) -> list[str]:
    """The lines on which ranks say what was wrong."""
    return [
        line for process in ended for line in process.err.splitlines() if line.startswith("error:")
    ]


def killed(directory: Path, target: Path, count: int, rank: int, writing: bool) -> list[Ended]:
    """A long text, one of whose ranks is killed when it is written, or as soon as they meet."""
    file = directory / "status"
    file.unlink(missing_ok=True)
    command = words(target, "-m", "3000")
    with Ranks(directory, [command] * count, status=file) as ranks:
        while not file.exists():
            time.sleep(0.02)
        if writing:
            ranks.read_char()
        ranks.signal(rank)
        ended = ranks.ends(SOON)
    assert file.read_text() == "1\n"
    return ended


@pytest.mark.parametrize(("rank", "writing"), [(0, True), (1, False)])
def test_a_rank_that_is_killed_ends_the_other_with_one_line(
    target: Path, tmp_path: Path, rank: int, writing: bool
) -> None:
    ended = killed(tmp_path, target, 2, rank, writing)
    assert [process.code for process in ended] == ([-9, 1] if rank == 0 else [1, -9])
    [line] = errors(ended)
    assert "another rank has ended" in line


def test_an_interrupt_of_rank_0_ends_all_with_the_text_so_far(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "status"
    command = words(target, "-m", "3000")
    with Ranks(tmp_path, [command] * 2, status=file) as ranks:
        while (first := ranks.read_char()).isspace():
            pass
        ranks.signal(1, signal.SIGINT)  # as a terminal has it: every rank gets one
        ranks.signal(0, signal.SIGINT)
        ended = ranks.ends(SOON)
    assert [process.code for process in ended] == [130, 130]
    assert (first + ended[0].out).startswith("t") and "interrupted" in ended[0].err
    assert ended[1].out == ended[1].err == ""
    assert errors(ended) == [] and file.read_text() == "130\n"


def refused(directory: Path, commands: list[list[str]]) -> str:
    """The one line that says why ranks do not work together."""
    with Ranks(directory, commands) as ranks:
        ended = ranks.ends()
    assert [process.code for process in ended] == [2] * len(commands), ended
    [line] = errors(ended)
    return line


def test_ranks_that_do_not_fit_together_are_refused(target: Path, tmp_path: Path) -> None:
    another = loopback.write("llama", tmp_path / "other", seed=1)
    command = words(target)
    line = refused(tmp_path, [command, words(target, prompt="t1")])
    assert "rank 1 was started with other arguments" in line
    copy = tmp_path / "here"
    copy.symlink_to(target)
    script = (
        "import os, sys; from pathlib import Path; from mlx_specdec.cli import start; "
        "os.chdir(sys.argv.pop(1)); sys.argv[0] = 'mlx-specdec'; start.main()"
    )
    for directory, model in (("a", target), ("b", another)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "model").symlink_to(model)
    command = ["generate", "--distributed", "tensor", "--model", "model", "t1"]
    commands = [["-c", script, str(tmp_path / name), *command] for name in ("a", "b")]
    assert "rank 1 has another model" in refused(tmp_path, commands)


def test_ranks_that_are_missing_are_not_waited_for_for_ever(target: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from mlx_specdec.cli import start; "
        "from mlx_specdec.models.distributed import group; "
        "group.MEETING = 2.5; sys.argv[0] = 'mlx-specdec'; start.main()"
    )
    command = ["-c", script, *words(target)[2:]]
    with Ranks(tmp_path, [command] * 2, [0]) as first:
        [waits] = first.ends()
    assert waits.code == -9
    assert errors([waits]) == [
        "error: not all ranks have come within 2.5 seconds: start all together"
    ]
