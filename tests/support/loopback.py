"""Several ranks on one machine, as mlx.launch would start them, and tiny models to share."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer, models, pre_tokenizers

from mlx_specdec import Options, generate_many, stream_generate

from . import tiny
from .shipped import ROOT, python_path

PROMPT = "t5 t9 t12 t7 t33 t21 t8"
SECONDS = 300
SLOWLY = re.compile(r"^(loading|prefilling the prompt|trying whether passes).*\n", re.MULTILINE)
"""Lines that a program prints if it takes more than two seconds, as on a busy machine."""


@dataclass(frozen=True)
class Ended:
    """The end of a rank. code: The exit status; negative if a signal ended it."""

    code: int
    out: str
    err: str


class Ranks:
    """Processes that are the ranks of one group; ended at the latest by `with`."""

    def __init__(
        self,
        directory: Path,
        commands: Sequence[Sequence[str]],
        started: Sequence[int] | None = None,
        status: Path | None = None,
    ) -> None:
        """commands: Each rank's arguments of Python. started: The ranks to start; None means
        all. status: The file for rank 0's exit code."""
        hosts = directory / f"hosts-{len(list(directory.glob('hosts-*')))}.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(commands))]))
        self._processes = [
            subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={
                    **os.environ,
                    "MLX_RANK": str(rank),
                    "MLX_HOSTFILE": str(hosts),
                    "PYTHONPATH": python_path(),
                    "HF_HUB_OFFLINE": "1",
                    **({} if status is None else {"MLX_SPECDEC_STATUS": str(status)}),
                },
            )
            for rank, command in enumerate(commands)
            if started is None or rank in started
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self._processes[rank].send_signal(number)

    def read_char(self, rank: int = 0) -> str:
        """Return the first character that a rank prints."""
        stream = self._processes[rank].stdout
        assert stream is not None
        return stream.read(1)

    def ends(self, seconds: float = SECONDS) -> list[Ended]:
        """Wait for all. Raises subprocess.TimeoutExpired."""
        report = [process.communicate(timeout=seconds) for process in self._processes]
        return [
            Ended(process.returncode, out, SLOWLY.sub("", err))
            for process, (out, err) in zip(self._processes, report, strict=True)
        ]


def run(directory: Path, count: int, *command: str, status: Path | None = None) -> list[Ended]:
    """Run a command on all ranks to its end."""
    with Ranks(directory, [command] * count, status=status) as ranks:
        return ranks.ends()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [int(opened.getsockname()[1]) for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def write(name: str, directory: Path, *, noise: float = 0.0, **changes: object) -> Path:
    """Write a tiny model with a tokenizer. Token i is the word ti. noise: The relative change of
    the weights, which makes a draft that is often right."""
    tiny.write(name, directory, **changes)
    if noise:
        file, keys = (
            str(directory / "model.safetensors"),
            iter(mx.random.split(mx.random.key(5), 999)),
        )
        weights = {
            name: w * (1 + noise * mx.random.normal(w.shape, key=next(keys)))
            for name, w in sorted(mx.load(file).items())  # type: ignore[union-attr]
        }
        mx.save_safetensors(file, weights, {"format": "mlx"})
    return add_words(directory)


def add_words(directory: Path) -> Path:
    """A tokenizer for a tiny model: token i is the word ti."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(tiny.VOCABULARY)}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def result_of(pair: Any, prompt: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return the generated texts and the counts of passes and accepted tokens."""
    settings = {k: v for k, v in case.items() if k != "prompts"}
    options = Options(cost_cache=False, **settings)
    if "prompts" in case:
        results = generate_many(pair, case["prompts"], options, batch_size=4)
        return {"texts": [result.text for result in results]}
    result = stream_generate(pair, prompt, options).result()
    return {
        "texts": [result.text],
        "passes": result.stats.target_passes,
        "accepted": result.stats.accepted,
    }
