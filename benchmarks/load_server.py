"""Send many requests at once to a server, and compare each text with the same request alone.

    python benchmarks/load_server.py
    python benchmarks/load_server.py --no-compare --no-seeds -- \\
        python -m mlx_lm server --model weights/py-llama --port 8096

    python benchmarks/load_server.py --model a --model b -- \\
        mlx-specdec serve --models-preset FILE --port 8096

With --model, requests take turns between models, and alone they are sent model by model. Use
--no-seeds for mlx_lm.server, which batches only requests without a seed. The command behind `--`
must listen on port 8096; by default it serves the shipped Python pair.
Some of the 16 clients leave early. Prints a line of JSON. The exit code is 1 if a text differs."""

import argparse
import http.client
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
LEAVING_SHARE = 0.1
"""Share of the requests whose client leaves early."""


@dataclass
class Received:
    """An answer. times: seconds from the request to each chunk of text."""

    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    left: bool = False
    problem: str = ""


def body_of(number: int, seeds: bool) -> dict[str, Any]:
    """Return the body of request `number`, whose settings and length follow from the number."""
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


def ask(served: Served, body: dict[str, Any], leaves: bool = False) -> Received:
    """Send a request, and read its stream to the end, or leave after three chunks."""
    received, began = Received(), time.perf_counter()
    connection = served.connect()
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status == 200:
            _read(answer, received, began, leaves)
        else:
            received.problem = f"{answer.status}: {answer.read()[:200]!r}"
    except OSError as problem:
        received.problem = type(problem).__name__
    finally:
        connection.close()
    return received


def _read(answer: http.client.HTTPResponse, received: Received, began: float, leaves: bool) -> None:
    while line := answer.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        received.problem = str(chunk.get("error") or "")
        received.tokens = (chunk.get("usage") or {}).get("completion_tokens", received.tokens)
        text = "".join(choice.get("text") or "" for choice in chunk.get("choices", []))
        if text:
            received.text += text
            received.times.append(time.perf_counter() - began)
        if leaves and len(received.times) == 3:
            received.left = True
            return


def ask_alone(served: Served, bodies: list[dict[str, Any]]) -> list[Received]:
    """Send one request after the other, those to one model in a row."""
    order = sorted(range(len(bodies)), key=lambda at: str(bodies[at].get("model")))
    answers = {at: ask(served, bodies[at]) for at in order}
    return [answers[at] for at in range(len(bodies))]


def load(
    served: Served, bodies: list[dict[str, Any]], clients: int
) -> tuple[list[Received], float]:
    """Send all requests, each as soon as a client is free. Return the answers, and the seconds."""
    leaving = [random.Random(-at).random() < LEAVING_SHARE for at in range(len(bodies))]
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda body, leaves: ask(served, body, leaves), bodies, leaving))
    return answers, time.perf_counter() - began


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(1000 * cuts[49], 2), "p99_ms": round(1000 * cuts[98], 2)}


def figures(answers: Sequence[Received], seconds: float) -> dict[str, Any]:
    """Return rates and latencies; the time between tokens is averaged over each answer."""
    complete = [one for one in answers if one.times and not one.left and not one.problem]
    gaps = [(one.times[-1] - one.times[0]) / (one.tokens - 1) for one in complete if one.tokens > 1]
    return {
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(complete) / seconds, 2),
        "tokens_per_second": round(sum(one.tokens for one in complete) / seconds, 1),
        "first_token": quantiles([one.times[0] for one in complete]),
        "between_tokens": quantiles(gaps),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--no-compare", action="store_true", help="send no request alone")
    parser.add_argument("--no-seeds", action="store_true", help="mlx_lm.server batches only these")
    parser.add_argument("--no-speculation", action="store_true", help="send speculative: false")
    parser.add_argument("--model", action="append", help="a model to ask for; may be repeated")
    parser.add_argument("command", nargs="*", help="the server to start")
    args = parser.parse_args()
    pair = ["--model", "weights/py-llama", "--draft-model", "weights/py-llama-draft"]
    default = [sys.executable, "-m", "mlx_specdec", "serve", *pair, "--port", str(PORT)]
    bodies = [body_of(number, not args.no_seeds) for number in range(args.requests)]
    if args.no_speculation:
        bodies = [{**body, "speculative": False} for body in bodies]
    if args.model:
        bodies = [
            {**body, "model": args.model[at % len(args.model)]} for at, body in enumerate(bodies)
        ]
    with serving(args.command or default, PORT) as served:
        for body in bodies[:4]:  # the first requests load kernels
            ask(served, body)
        alone = [] if args.no_compare else ask_alone(served, bodies)
        answers, seconds = load(served, bodies, args.clients)
    differing = [
        at
        for at, (one, expected) in enumerate(zip(answers, alone, strict=False))
        if not one.left and one.text != expected.text
    ]
    report = {
        "requests": len(answers),
        "left_early": sum(one.left for one in answers),
        "problems": [one.problem for one in answers if one.problem][:5],
        "compared": sum(not one.left for one in answers) if alone else 0,
        "differing": differing,
        **figures(answers, seconds),
    }
    print(json.dumps(report))
    sys.exit(1 if differing or report["problems"] else 0)


if __name__ == "__main__":
    main()
