"""The model of `mlx-specdec estimate --distributed` against ranks with a delay between them.

    W=weights/py-llama
    python scripts/measure_link_delay.py --model $W --draft-model $W-draft

Ranks on this machine, plain and with drafts; what one sends another goes through a relay that holds
it for a time. The times without a delay are the local part of a pass, the relay's own time
included; the rest is predicted: a sum over N ranks in a ring waits for 2 (N - 1) messages, one
after the other. One line of JSON a delay: passes a second and tokens a second, predicted and
measured, and how far apart. `held_ms` is for how long the relay has really held a message, which
the prediction takes: more than it was asked to where the machine has other things to do. Nothing
here needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from mlx_specdec.costs.cluster import shared
from mlx_specdec.costs.speedup import RoundCost

LOCAL = "127.0.0.1"
CHUNK = 1 << 16
AGAIN = 0.05
"""Seconds until a relay calls a rank again that does not listen yet."""
PROMPT = "def fibonacci(n):"
ROOT = Path(__file__).resolve().parents[1]


class Relays:
    """What rank r sends to its right neighbor, and the other way round, each held for `delay`
    seconds. ports: that ranks listen on. places: that relays listen on in their stead. held: for
    how many seconds each message was."""

    def __init__(self, ports: Sequence[int], delay: float) -> None:
        self._ports = ports
        self._delay = delay
        self._calls: set[asyncio.Task[None] | None] = set()
        self._listening = threading.Event()
        self.held: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._listening.wait()

    def stop(self) -> None:
        """To be called when all ranks have ended."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        servers = [await asyncio.start_server(self._caller(port), LOCAL, 0) for port in self._ports]
        self.places = [int(server.sockets[0].getsockname()[1]) for server in servers]
        self._listening.set()
        await self._over.wait()
        for server in servers:
            server.close()
        await asyncio.gather(*filter(None, self._calls))

    def _caller(self, port: int) -> Any:
        async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._calls.add(asyncio.current_task())
            while not self._over.is_set():
                with contextlib.suppress(OSError):
                    called, calling = await asyncio.open_connection(LOCAL, port)
                    both = self._pass_on(reader, calling), self._pass_on(called, writer)
                    await asyncio.gather(*both)
                    return
                await asyncio.sleep(AGAIN)
            writer.close()

        return call

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: deque[tuple[float, bytes]] = deque()

        def let_go() -> None:
            came, data = waiting.popleft()
            writer.write(data)
            self.held.append(self._loop.time() - came)

        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                waiting.append((self._loop.time(), data))
                self._loop.call_later(self._delay, let_go)
        while waiting:
            await asyncio.sleep(self._delay)
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()


def precise_loop() -> asyncio.AbstractEventLoop:
    """One whose clock has no grain; the ordinary one waits for whole milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


@contextlib.contextmanager
def hostfiles(relays: Relays, ports: Sequence[int]) -> Iterator[list[Path]]:
    """One for each rank: it listens itself, and calls its right neighbor through a relay."""
    try:
        with tempfile.TemporaryDirectory() as made:
            files = [Path(made) / f"hosts-{rank}.json" for rank in range(len(ports))]
            for rank, file in enumerate(files):
                heard = [*relays.places]
                heard[rank] = ports[rank]
                file.write_text(json.dumps([[f"{LOCAL}:{port}"] for port in heard]))
            yield files
    finally:
        relays.stop()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCAL, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def generate(ranks: int, delay: float, words: Sequence[str]) -> dict[str, Any]:
    """What `mlx-specdec generate --json` tells of a target that so many ranks share, and "held",
    the seconds that relays have held a message on average."""
    line = [sys.executable, "-m", "mlx_specdec", "generate", "--distributed", "tensor", *words]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ports = free_ports(ranks)
    relays = Relays(ports, delay)
    with hostfiles(relays, ports) as files:
        processes = [
            subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "MLX_RANK": str(rank),
                    "MLX_HOSTFILE": str(file),
                },
            )
            for rank, file in enumerate(files)
        ]
        told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    return {**json.loads(told[0]), "held": mean(relays.held)}


@dataclass(frozen=True)
class Rounds:
    """seconds: of a round; of plain decoding a round is a step. tokens: of a round. held: seconds
    that a message was held."""

    seconds: float
    tokens: float
    held: float


def rounds(told: Sequence[dict[str, Any]]) -> Rounds:
    """The median of several runs that wrote the same text."""
    assert len({each["text"] for each in told}) == 1, "ranks wrote different texts"
    tokens = told[0]["stats"]["tokens_per_round"]
    rate = median(each["stats"]["tokens_per_second"] for each in told)
    return Rounds(tokens / rate, tokens, mean(each["held"] for each in told))


def predicted(plain: float, alone: Rounds, network: float) -> Rounds:
    """What takes a pass so many seconds more, by the formulas of estimate, where all that was
    measured without a delay is a machine's own share. plain: seconds of a plain step then."""
    cost = RoundCost(0.0, {1: 1.0, 2: alone.seconds / plain})
    cluster = shared(cost, 1.0, network / plain)
    return replace(alone, seconds=(plain + network) * cluster.of((1.0,)))


def compared(expected: Rounds, measured: Rounds) -> dict[str, float]:
    """In rounds a second, which are passes."""
    return {
        "passes_per_second_predicted": round(1 / expected.seconds, 2),
        "passes_per_second": round(1 / measured.seconds, 2),
        "tokens_per_second": round(measured.tokens / measured.seconds, 2),
        "held_ms": round(1000 * measured.held, 3),
        "off": round(measured.seconds / expected.seconds - 1, 4),
    }


def speedup(plain: Rounds, drafted: Rounds) -> float:
    """Of tokens a second."""
    return drafted.tokens / drafted.seconds * plain.seconds / plain.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--delays-ms", default="0,1,5", help="of a message, with commas")
    parser.add_argument("--num-draft", default="4")
    parser.add_argument("--max-tokens", default="64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", default=PROMPT)
    args = parser.parse_args()
    models = ["--model", args.model, "--draft-model", args.draft_model, "--json", "--no-cache"]
    asked = [*models, "--max-tokens", args.max_tokens, args.prompt]
    layers = json.loads((Path(args.model) / "config.json").read_text())["num_hidden_layers"]
    # Two sums a layer, and one in which rank 0 tells what it has decided.
    hops = (2 * layers + 1) * 2 * (args.ranks - 1)
    first: list[Rounds] = []
    for delay in (float(each) / 1000 for each in args.delays_ms.split(",")):
        runs = [
            (
                generate(args.ranks, delay, ["--regular-decode", *asked]),
                generate(args.ranks, delay, ["--num-draft", args.num_draft, *asked]),
            )
            for _ in range(args.repeats)
        ]
        measured = [rounds(told) for told in zip(*runs, strict=True)]
        first = first or measured
        expected = [
            predicted(first[0].seconds, alone, hops * (now.held - alone.held))
            for alone, now in zip(first, measured, strict=True)
        ]
        line = {
            "delay_ms": 1000 * delay,
            "messages_in_a_pass": hops,
            "plain": compared(expected[0], measured[0]),
            "drafted": compared(expected[1], measured[1]),
            "speedup_predicted": round(speedup(*expected), 3),
            "speedup": round(speedup(*measured), 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
