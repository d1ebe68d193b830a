"""Keep a mixed load on a server, and measure whether its memory grows.

    python benchmarks/soak_server.py [--minutes 30] [--rate 1.5] [-- FLAGS OF serve]

The server runs the shipped Python pair with a chat template that knows tools, and its prompt cache
is always full. Clients stream, leave early, set schemas, call tools and hold chats. Every minute
prints a line of JSON with the server's memory, files and threads. The exit code is 1 if an answer
was an error, or if the text of one repeated request changed."""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from load_server import PROMPTS, ask, body_of
from served import Served, serving

PORT = 8098
CLIENTS = 4
CACHE = "24MB"
CONTEXT = "768"
"""Tokens: so few that chats end and new ones begin all the time."""
WARM_MINUTES = 3
"""Minutes until caches are full and every kind of request has come."""
WEIGHTS = Path("weights")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    '<tool_call>{"name": "{{ tool_call.name }}"}</tool_call>{% endfor %}\n{% endfor %}'
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "mood": {"enum": ["calm", "cross"]},
    },
    "required": ["name", "ages", "mood"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "keep", "parameters": SCHEMA}}]
FIXED = {"prompt": PROMPTS[0], "max_tokens": 32, "temperature": 0.7, "seed": 3}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def templated(target: Path, source: Path) -> Path:
    """Copy a model, and give the copy the template."""
    shutil.copytree(source, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target


class Clients:
    """Clients that share one rate. became: number of requests by their kind and their end."""

    def __init__(self, served: Served, rate: float) -> None:
        self.became: Counter[str] = Counter()
        self.over = threading.Event()
        self._served = served
        self._pause = CLIENTS / rate
        self._threads = [threading.Thread(target=self._work, args=[at]) for at in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait until the last request has ended."""
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, first: int) -> None:
        number, talk = first, list[dict[str, Any]]()
        dice = random.Random(first)
        while not self.over.wait(dice.expovariate(1 / self._pause)):
            kind = dice.choice(["stream", "leave", "hang up", "schema", "tools", "chat", "chat"])
            try:
                ended = self._one(kind, number, talk)
            except OSError as problem:
                ended = type(problem).__name__
            self.became[f"{kind}: {ended}"] += 1
            number += CLIENTS

    def _one(self, kind: str, number: int, talk: list[dict[str, Any]]) -> str:
        if kind in ("stream", "leave"):
            return ask(self._served, body_of(number, True), kind == "leave").problem or "200"
        if kind == "hang up":
            return self._hang_up(body_of(number, True))
        if kind == "chat":
            return self._turn(number, talk)
        words = [{"role": "user", "content": random.Random(number).choice(PROMPTS)}]
        body = {"messages": words, "max_tokens": 100, "temperature": 0.8, "seed": number}
        bound = {"tools": TOOLS, "tool_choice": "required"}
        more = bound if kind == "tools" else {"response_format": FORMAT, "n": 2}
        return self._post({**body, **more})[0]

    def _post(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        status, content = self._served.ask("POST", CHAT, json.dumps(body).encode())
        return str(status), json.loads(content)

    def _turn(self, number: int, talk: list[dict[str, Any]]) -> str:
        """Send one more turn of a chat, and forget the chat if it is too long."""
        talk.append({"role": "user", "content": random.Random(number).choice(PROMPTS)})
        status, answer = self._post({"messages": talk, "max_tokens": 48, "seed": number})
        if status == "200":
            talk.append(answer["choices"][0]["message"])
        else:
            talk.clear()
        long = answer.get("error", {}).get("code") == "context_length_exceeded"
        return "too long" if long else status

    def _hang_up(self, body: dict[str, Any]) -> str:
        """Ask, and leave before the answer."""
        connection = self._served.connect()
        kind = {"Content-Type": "application/json"}
        connection.request("POST", COMPLETION, json.dumps({**body, "stream": False}), kind)
        time.sleep(0.1)
        connection.close()
        return "200"


def look(served: Served, began: float, clients: Clients) -> dict[str, Any]:
    """Return the memory of the server, and its counts of requests."""
    metrics = served.ask("GET", "/metrics")[1].decode()
    lines = (line for line in metrics.splitlines() if line[:1] != "#")
    # The server has one model.
    values = {line.partition("{")[0]: line.rsplit(" ", 1)[1] for line in lines}
    queries, hits = (
        next(float(values[name]) for name in values if name.startswith(f"vllm:prefix_cache_{each}"))
        for each in ("queries", "hits")
    )
    return {
        "minute": round((time.monotonic() - began) / 60, 1),
        "resident_mib": round(served.resident_bytes() / 2**20, 1),
        **served.open_files_and_threads(),
        "cache_mib": round(float(values["mlx_specdec:prompt_cache_bytes"]) / 2**20, 1),
        "cached_share": round(hits / queries, 3) if queries else 0,
        "cancelled": int(values["mlx_specdec:requests_cancelled_total"]),
        "requests": clients.became.total(),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        model = templated(Path(place) / "soaked", WEIGHTS / "py-llama")
        command = [sys.executable, "-m", "mlx_specdec", "serve", "--port", str(PORT)]
        pair = ["--model", str(model), "--draft-model", str(WEIGHTS / "py-llama-draft")]
        bounds = ["--prompt-cache-bytes", CACHE, "--max-model-len", CONTEXT, "--no-cost-cache"]
        more = [each for each in flags if each != "--"]
        with serving([*command, *pair, *bounds, *more], PORT) as served:
            sys.exit(soak(served, args.minutes, args.rate))


def soak(served: Served, minutes: int, rate: float) -> int:
    """Keep the load for so many minutes. Return the exit code."""
    text, same = served.complete(FIXED)["choices"][0]["text"], True
    began, clients = time.monotonic(), Clients(served, rate)
    seen = []
    try:
        for minute in range(minutes + 1):
            time.sleep(max(0, began + 60 * minute - time.monotonic()))
            seen.append(look(served, began, clients))
            print(json.dumps(seen[-1]), flush=True)
            same = same and served.complete(FIXED)["choices"][0]["text"] == text
    finally:
        clients.end()
    time.sleep(1)
    became = clients.became
    warm = seen[WARM_MINUTES:]
    report = {
        "became": dict(sorted(became.items())),
        "same_text_throughout": same,
        "at_rest": look(served, began, clients),
    }
    if len(warm) > 1:
        slope = statistics.linear_regression(
            [each["minute"] for each in warm], [each["resident_mib"] for each in warm]
        ).slope
        report["mib_an_hour"] = round(60 * slope, 1)
    print(json.dumps(report))
    wrong = [each for each in became if each.split(": ")[1] not in ("200", "too long")]
    return 1 if wrong or not same else 0


if __name__ == "__main__":
    main()
