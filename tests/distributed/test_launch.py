"""The launch command builds mlx.launch's, and says what a machine lacks."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_specdec import Options, generate, load
from mlx_specdec.cli import launch as launching
from mlx_specdec.cli.launch import Machines, mlx_launch
from mlx_specdec.errors import OptionError

from ..support import loopback

WORDS = ["generate", "--model", "m", "t1"]


def machines(**flags: object) -> Machines:
    """Return the default flags with some changes."""
    plain: dict[str, object] = {"hosts": None, "n": None, "backend": "ring", "env": None}
    return Machines(**{**plain, "words": WORDS, **flags})  # type: ignore[arg-type]


def answer(monkeypatch: pytest.MonkeyPatch, code: int, out: str) -> None:
    """Replace ssh by an answer of a machine."""

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert words[0] == "ssh" and words[5] == "b" and sys.executable in words[6]
        return subprocess.CompletedProcess(words, code, out, "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("mode", ["tensor", "pipeline"])
def test_the_command_is_that_of_mlx_launch(tmp_path: Path, mode: str) -> None:
    status = tmp_path / "status"
    more = ["--distributed", "pipeline"] if mode == "pipeline" else []
    words = mlx_launch(machines(hosts="a,b", env=["X=1"], words=[*WORDS, *more]), status)
    behind = words.index("--")
    assert Path(words[0]).name == "mlx.launch"
    assert words[1:behind] == [
        *("--hosts", "a,b", "--backend", "ring", "--cwd", os.getcwd()),
        *("--env", "X=1", "--env", f"MLX_SPECDEC_STATUS={status}"),
    ]
    command = words[behind + 1 :]
    assert command[:4] == [sys.executable, "-m", "mlx_specdec", "generate"]
    assert command.count("--distributed") == 1
    assert command[command.index("--distributed") + 1] == mode


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "give hosts, or n"),
        ({"hosts": "a,b", "n": 2}, "give hosts, or n"),
        ({"n": 1}, "n must be 2 or more, not 1"),
        ({"hosts": "a"}, "two hosts or more"),
        ({"hosts": "a,"}, "two hosts or more"),
        ({"hosts": "nowhere.json"}, "or a hostfile"),
    ],
)
def test_what_names_no_machines_is_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        launching.hosts_of(machines(**flags))


def test_what_a_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    for code, out, message in (
        (255, "", ["b cannot be reached by ssh without a password: run ssh-copy-id b"]),
        (0, sys.executable, [f"b has no {sys.executable}: put it there"]),
        (0, str(tmp_path), [f"b has no {tmp_path}: put it there"]),
        (0, f"Welcome to b\n{tmp_path / 'm'}", [f"b has no {tmp_path / 'm'}: put it there"]),
        (0, "Welcome to b\n", []),
    ):
        answer(monkeypatch, code, out)
        assert launching._missing("b", WORDS) == message
    assert launching._missing(launching.LOCAL, WORDS) == []


def test_ranks_here_listen_at_adjacent_ports_that_are_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = launching._free_ports(4)
    monkeypatch.setattr(launching, "PORTS", range(first, first + 3))
    with socket.create_server((launching.LOCAL, first + 1)):
        words = mlx_launch(machines(n=2), tmp_path / "status")
    assert words[words.index("--starting-port") + 1] == str(first + 2)


WAITS = "import time; print('waits', flush=True); time.sleep(30)"
STARTS = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {WAITS!r}], stderr=subprocess.DEVNULL)
"""
LAUNCHES = f"""
import signal, sys
from mlx_specdec.cli.launch import _run
signal.signal(signal.SIGHUP, signal.SIG_DFL)
_run([sys.executable, "-c", {STARTS!r}])
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ranks_do_not_outlive_the_command_or_its_terminal(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHES], stdout=subprocess.PIPE, text=True, cwd=loopback.ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    process.send_signal(number)
    assert process.communicate(timeout=25)[0] == "ended\n"
    assert process.returncode == 0


@pytest.mark.slow
def test_ranks_on_this_machine_print_the_text_of_one(tmp_path: Path) -> None:
    target = str(loopback.write("llama", tmp_path / "target"))
    words = ["generate", "--model", target, "--no-cost-cache", "--quiet", "-m8", loopback.PROMPT]
    package = [sys.executable, "-m", "mlx_specdec"]
    begin = ["launch", "-n", "2", "--"]
    shared = subprocess.run([*package, *begin, *words], capture_output=True, text=True)
    alone = generate(load(target), loopback.PROMPT, Options(max_tokens=8, cost_cache=False))
    assert (shared.returncode, shared.stdout) == (0, f"{alone.text}\n"), shared.stderr
    wrong = subprocess.run(
        [*package, *begin, *words[:-3], "--num-draft", "99", "t1"], capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert wrong.stderr.count("error: num-draft must be auto or lie between") == 1
