"""The launch command builds mlx.launch's, and says what a machine lacks."""

from __future__ import annotations

import json
import os
import signal
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


def machines(**given: object) -> Machines:
    """As the flags are by default, but for some."""
    plain: dict[str, object] = {
        "hosts": None,
        "n": None,
        "hostfile": None,
        "backend": "ring",
        "mode": "tensor",
        "starting_port": 32323,
        "env": None,
        "show": False,
    }
    return Machines(**plain | given)  # type: ignore[arg-type]


def answers(monkeypatch: pytest.MonkeyPatch, **of_host: object) -> list[list[str]]:
    """What machines say when they are looked at, in the place of ssh; returns what was run."""
    asked: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        told = of_host.get(words[5] if words[0] == "ssh" else "here", {})
        if isinstance(told, int):
            return subprocess.CompletedProcess(words, told, "", "")
        here = {name: launching.version(name) for name in launching.PACKAGES}
        full = {"cwd": True, "m": True} | here | dict(told)  # type: ignore[call-overload]
        return subprocess.CompletedProcess(words, 0, json.dumps(full), "")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_the_command_is_that_of_mlx_launch(tmp_path: Path) -> None:
    asked = machines(hosts="a,b", env=["X=1"], mode="pipeline")
    words = mlx_launch(asked, WORDS, tmp_path / "status")
    behind = words.index("--")
    assert Path(words[0]).name == "mlx.launch"
    assert words[1:behind] == [
        *("--hosts", "a,b", "--backend", "ring", "--starting-port", "32323"),
        *("--cwd", os.getcwd(), "--env", "X=1"),
    ]
    assert words[behind + 1 :] == [
        *(sys.executable, "-m", "mlx_specdec", "generate", "--distributed", "pipeline"),
        *("--status-file", str(tmp_path / "status"), "--model", "m", "t1"),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give hosts, or n"),
        ({"hosts": "a,b", "n": 2}, "give hosts, or n"),
        ({"n": 1}, "n must be 2 or more, not 1"),
        ({"hosts": "a"}, "two hosts or more"),
        ({"hosts": "a,"}, "two hosts or more"),
        ({"hostfile": Path("nowhere.json")}, "hostfile nowhere.json cannot be read"),
    ],
)
def test_what_names_no_machines_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        launching.hosts_of(machines(**given))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (255, "b cannot be reached by ssh without a password: run ssh-copy-id b"),
        (127, f"b has no {sys.executable}"),
        ({"cwd": False}, f"b has no directory {os.getcwd()}"),
        ({"mlx-lm": "0.1"}, "b has mlx-lm 0.1, and this machine"),
        ({"mlx": None}, "b has mlx None, and this machine"),
    ],
)
def test_what_a_machine_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, told: object, said: str
) -> None:
    answers(monkeypatch, b=told)
    assert any(said in line for line in launching._missing("b", WORDS))
    assert launching._missing("a", WORDS) == []


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


def test_a_model_that_is_here_and_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    answers(monkeypatch, b={"m": False})
    assert launching._missing("b", WORDS) == ["b has no m: copy it there"]


@pytest.mark.slow
def test_ranks_on_this_machine_print_the_text_of_one(tmp_path: Path) -> None:
    target = str(loopback.write("llama", tmp_path / "target"))
    words = ["generate", "--model", target, "--no-cache", "--quiet", "-m", "8", loopback.PROMPT]
    package = [sys.executable, "-m", "mlx_specdec"]
    [port] = loopback.free_ports(1)
    begin = ["launch", "-n", "2", "--starting-port", str(port), "--"]
    shared = subprocess.run([*package, *begin, *words], capture_output=True, text=True)
    alone = generate(load(target), loopback.PROMPT, Options(max_tokens=8, cost_cache=False))
    assert (shared.returncode, shared.stdout) == (0, f"{alone.text}\n"), shared.stderr
    wrong = subprocess.run(
        [*package, *begin, *words[:-3], "--num-draft", "99", "t1"], capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert wrong.stderr.count("error: num-draft must be auto or lie between") == 1
