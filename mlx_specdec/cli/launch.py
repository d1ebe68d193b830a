"""The launch command: start the ranks of another command on several machines by mlx.launch."""

import itertools
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import typer

from ..errors import OptionError
from ..models.distributed import STATUS
from . import render
from .flags import REQUIRED, Flags, command, flag

LOCAL = "127.0.0.1"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
MODEL_FLAGS = ("--model", "--model-name")
PACKAGE = __name__.partition(".")[0]
PORTS = range(20_000, 30_000)
"""Ports of the ranks on this machine. Linux and macOS usually give higher ports to connections and
to servers that ask for any port."""


class Machines(Flags, panel="Machines"):
    hosts: str | None = flag(
        "The machines, as ssh knows them, or a hostfile that mlx.distributed_config wrote; the "
        "first one is rank 0.",
        None,
        "--hostfile",
        metavar="A,B|FILE",
    )
    n: int | None = flag("The number of ranks on this machine, instead of hosts.", None, "-n")
    backend: Literal["ring", "jaccl", "jaccl-ring", "mpi", "nccl"] = flag(
        "The back end of mx.distributed; jaccl is RDMA over Thunderbolt 5.", "ring"
    )
    env: list[str] | None = flag(
        "A variable for all ranks; the flag may be repeated.", metavar="NAME=VALUE"
    )
    words: list[str] = flag(
        "A command of mlx-specdec with its flags, after --. If it has no --distributed, "
        "--distributed tensor is added.",
        REQUIRED,
        argument=True,
        metavar="COMMAND...",
        panel="Command",
    )


@command(
    'mlx-specdec launch -n 2 -- generate --model weights/py-llama "def f(x):"',
    "mlx-specdec launch --hosts mac1.local,mac2.local -- serve --model mlx-community/Qwen3-8B-4bit",
)
def launch(machines: Machines) -> None:
    """Run a command whose target is shared by several machines.

    Every machine needs the same Python environment, the same working directory and the model, at
    the same paths, and ssh without a password. It exits with the code of rank 0."""
    hosts = hosts_of(machines)
    missing = [line for host in dict.fromkeys(hosts) for line in _missing(host, machines.words)]
    if missing:
        raise OptionError("; ".join(missing))
    with tempfile.TemporaryDirectory() as made:
        # Rank 0 writes this file on its own machine, which may lack the temporary directory.
        status = Path(made) / "status" if hosts[0] == LOCAL else Path(f"/tmp/{Path(made).name}")
        _run(mlx_launch(machines, status))
        file = shlex.quote(str(status))
        code = _ask(hosts[0], f"cat {file} && rm {file}").stdout.strip()
    if not code.isdigit():
        render.tell("error: rank 0 has not come so far as to say how it ended")
    raise typer.Exit(int(code) if code.isdigit() else 1)


def mlx_launch(machines: Machines, status: Path) -> list[str]:
    """Return the command line of mlx.launch."""
    if machines.hosts is None:
        where = ["-n", str(machines.n)]
        if machines.backend == "ring":
            where += ["--starting-port", str(_free_ports(len(hosts_of(machines))))]
    else:
        where = ["--hostfile" if os.path.isfile(machines.hosts) else "--hosts", machines.hosts]
    words = machines.words
    variables = [*(machines.env or ()), f"{STATUS}={status}"]
    mode = any(word.partition("=")[0] == "--distributed" for word in words)
    added = () if mode else ("--distributed", "tensor")
    return [
        *(str(Path(sys.executable).with_name("mlx.launch")), *where),
        *("--backend", machines.backend, "--cwd", os.getcwd()),
        *(word for variable in variables for word in ("--env", variable)),
        *("--", sys.executable, "-m", PACKAGE, words[0], *added, *words[1:]),
    ]


def _free_ports(count: int) -> int:
    """Return the first of `count` adjacent ports that nobody uses."""
    for first in random.sample(PORTS, len(PORTS)):
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server((LOCAL, port)))
            return first
    raise OptionError(f"no {count} adjacent ports are free for ranks on this machine: try again")


def hosts_of(machines: Machines) -> list[str]:
    """Return the machines in the order of ranks. Raises OptionError if flags are wrong."""
    if machines.hosts is None and machines.n is not None:
        if machines.n < 2:
            raise OptionError(f"n must be 2 or more, not {machines.n}")
        return [LOCAL] * machines.n
    if machines.hosts is None or machines.n is not None:
        raise OptionError("give hosts, or n for ranks on this machine")
    hosts = [host.strip() for host in machines.hosts.split(",")]
    if os.path.isfile(machines.hosts):
        try:
            listed = json.loads(Path(machines.hosts).read_text(encoding="utf-8-sig"))
            listed = listed["hosts"] if isinstance(listed, dict) else listed
            hosts = [entry["ssh"] for entry in listed]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise OptionError(
                f"hostfile {machines.hosts} cannot be read ({problem!s:.100}): write it with "
                "mlx.distributed_config"
            ) from None
    if len(hosts) < 2 or not all(hosts):
        raise OptionError("name two hosts or more, with commas between them, or a hostfile")
    return hosts


def _missing(host: str, words: Sequence[str]) -> list[str]:
    """Return messages about paths that another machine lacks: Python, the working directory, and
    the value of --model. Versions and contents of files are compared later, by the ranks."""
    if host == LOCAL:
        return []
    pairs = [*itertools.pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]
    models = [os.path.abspath(value) for name, value in pairs if name in MODEL_FLAGS]
    needed = [sys.executable, os.getcwd(), *filter(os.path.exists, models)]
    tests = (f"test -e {shlex.quote(path)} || echo {shlex.quote(path)}" for path in needed)
    done = _ask(host, "; ".join(tests))
    if done.returncode == 255:
        return [f"{host} cannot be reached by ssh without a password: run ssh-copy-id {host}"]
    lacks = done.stdout.splitlines()
    return [f"{host} has no {path}: put it there" for path in needed if path in lacks]


def _ask(host: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command on a machine and return its output."""
    words = ["sh", "-c", command] if host == LOCAL else [*SSH, host, command]
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _run(words: Sequence[str]) -> None:
    """Run mlx.launch until it ends. If it were interrupted, its ranks would stay alive. Therefore
    SIGINT, SIGTERM and SIGHUP are passed on to the ranks: rank 0 ends, and the other ranks
    follow."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            # Since this handler is not Python's own, `interrupts` does not end the process.
            signal.signal(number, partial(signal.default_int_handler))
    process = subprocess.Popen(words, start_new_session=True)
    while True:
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            children = ""
            with suppress(FileNotFoundError):  # a machine without pgrep
                pgrep = ["pgrep", "-P", str(process.pid)]
                children = subprocess.run(pgrep, capture_output=True, text=True).stdout
            for child in children.split() or [str(process.pid)]:
                os.kill(int(child), signal.SIGINT)
