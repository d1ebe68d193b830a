"""Many clients at once against one server: no text may differ from the one it is alone.

    python scripts/load_server.py
    python scripts/load_server.py --no-compare -- \\
        python -m mlx_lm server --model weights/py-llama --port 8096

Starts the command behind `--`, which has to listen on port 8096 (default: the shipped Python pair),
sends it 200 requests over 16 clients, some of which leave early, and compares each text with that
of the same request alone. Prints a line of JSON; the exit code is 1 where a text differs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from served import Served, serving

PORT = 8096
PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\n\ndef walk(directory, suffix):\n    names = []\n",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n" * 4,
)
LEAVES = 0.1
"""Share of the clients' requests that they give up early."""


@dataclass
class Heard:
    """What a client heard of one request. times: when chunks of text came, from the beginning."""

    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    left: bool = False
    problem: str = ""


def body_of(number: int, seeds: bool) -> dict[str, Any]:
    """Request `number`: its settings and length follow from the number."""
    dice = random.Random(number)
    settings: dict[str, Any] = dice.choice(
        [{}, {"top_p": 0.9}, {"top_k": 20}, {"frequency_penalty": 0.5}, {"min_p": 0.05}]
    )
    body = {
        "prompt": dice.choice(PROMPTS),
        "max_tokens": dice.choice([8, 32, 64, 128]),
        "temperature": dice.choice([0.0, 0.0, 0.7, 1.0]),
        **settings,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**body, "seed": number} if seeds else body


def ask(served: Served, body: dict[str, Any], leaves: bool = False) -> Heard:
    """Send a request, and hear it to its end or leave after some chunks."""
    heard, began = Heard(), time.perf_counter()
    connection = served.connect()
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            heard.problem = f"{answer.status}: {answer.read()[:200]!r}"
            return heard
        _hear(answer, heard, began, leaves)
    except OSError as problem:
        heard.problem = type(problem).__name__
    finally:
        connection.close()
    return heard


def _hear(answer: http.client.HTTPResponse, heard: Heard, began: float, leaves: bool) -> None:
    while line := answer.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        heard.problem = str(chunk.get("error") or "")
        heard.tokens = (chunk.get("usage") or {}).get("completion_tokens", heard.tokens)
        text = "".join(each.get("text") or "" for each in chunk.get("choices", []))
        if text:
            heard.text += text
            heard.times.append(time.perf_counter() - began)
        if leaves and len(heard.times) == 3:
            heard.left = True
            return


def load(
    served: Served, bodies: list[dict[str, Any]], clients: int, leaves: float = LEAVES
) -> tuple[list[Heard], float]:
    """All requests, each sent as soon as a client is free; and the seconds that they took together.
    leaves: the share of them that are given up early."""
    heard = [Heard() for _ in bodies]
    leaving = {at for at in range(len(bodies)) if random.Random(-at).random() < leaves}
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for at in range(len(bodies)):
        left.put(at)

    def client() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                at = left.get_nowait()
                heard[at] = ask(served, bodies[at], at in leaving)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return heard, time.perf_counter() - began


def quantiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": round(1000 * cuts[49], 2), "p99_ms": round(1000 * cuts[98], 2)}


def figures(heard: Sequence[Heard], seconds: float) -> dict[str, Any]:
    """Rates, times to the first token of a request and, on average of each, between tokens."""
    whole = [each for each in heard if not each.left and not each.problem]
    gaps = [
        (each.times[-1] - each.times[0]) / (each.tokens - 1)
        for each in whole
        if each.tokens > 1 and len(each.times) > 1
    ]
    return {
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(whole) / seconds, 2),
        "tokens_per_second": round(sum(each.tokens for each in whole) / seconds, 1),
        "first_token": quantiles([each.times[0] for each in whole if each.times]),
        "between_tokens": quantiles(gaps),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--no-compare", action="store_true", help="do not ask each request alone")
    parser.add_argument(
        "--no-seeds", action="store_true", help="name no seeds: mlx_lm.server batches those"
    )
    parser.add_argument("--no-speculation", action="store_true", help="send speculative: false")
    parser.add_argument("command", nargs="*", help="what to start instead")
    args = parser.parse_args()
    pair = ["--model", "weights/py-llama", "--draft-model", "weights/py-llama-draft"]
    ours = [sys.executable, "-m", "mlx_specdec", "serve", *pair, "--port", str(PORT)]
    bodies = [body_of(number, not args.no_seeds) for number in range(args.requests)]
    if args.no_speculation:
        bodies = [{**each, "speculative": False} for each in bodies]
    with serving(args.command or ours, PORT) as served:
        # Models and kernels are warm, for the first one as for the others.
        for body in bodies[:4]:
            ask(served, body)
        alone = [] if args.no_compare else [ask(served, each) for each in bodies]
        heard, seconds = load(served, bodies, args.clients)
    differing = [
        at
        for at, (one, own_text) in enumerate(zip(heard, alone, strict=False))
        if not one.left and one.text != own_text.text
    ]
    report = {
        "requests": len(heard),
        "left_early": sum(each.left for each in heard),
        "problems": [each.problem for each in heard if each.problem][:5],
        "compared": len(alone) - sum(each.left for each in heard) if alone else 0,
        "differing": differing,
        **figures(heard, seconds),
    }
    print(json.dumps(report))
    sys.exit(1 if differing or any(each.problem for each in heard) else 0)


if __name__ == "__main__":
    main()
