"""Measure how long short requests wait while a server prefills a long prompt:

    python benchmarks/long_prompt.py LONG_MODEL OTHER_MODEL [--tokens 7600] [-- COMMAND...]

The server has both models. Two clients send one completion of 8 tokens after the other, one to each
model: first alone, and then while the long prompt of a third is prefilled. Then another prompt of
this length is prefilled alone, and a third is cancelled after half of that time and sent again.
Prints one line of JSON with seconds."""

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
from typing import Any

from served import Served, serving

PORT = 8097
PATIENCE = 3000.0
ALONE = 6
"""Completions of each model that are timed before the long prompt."""
WORDS = ("river", "stone", "green", "moved", "house", "many", "years", "before", "light", "paper")


def text(words: int, seed: int) -> str:
    """Return a text of about this many tokens, which no other seed shares a beginning with."""
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words))


def completion(served: Served, model: str, prompt: str, patience: float = PATIENCE) -> float:
    """Return the seconds of a completion of 8 tokens. Raises TimeoutError after `patience`."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    began = time.perf_counter()
    connection = served.connect(patience)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise SystemExit(f"{answer.status}: {content.decode('utf-8', 'replace')[:300]}")
    return time.perf_counter() - began


def repeat(served: Served, model: str, until: threading.Event, found: list[float]) -> None:
    """Send short requests, with half a second between them, until the event is set."""
    while not until.is_set():
        found.append(completion(served, model, text(12, 1000 + len(found))))
        until.wait(0.5)


def summary(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    shown = statistics.median(seconds), max(seconds)
    return {"median": round(shown[0], 2), "most": round(shown[1], 2), "count": len(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs=2)
    parser.add_argument("--tokens", type=int, default=7600)
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    models = [part for model in given.models for part in ("--model", model)]
    command = given.command or [
        sys.executable,
        "-m",
        "mlx_specdec",
        "serve",
        *models,
        *("--port", str(PORT), "--timeout", str(PATIENCE)),
    ]
    result: dict[str, Any] = {"tokens": given.tokens}
    with serving(command, PORT) as served:
        names = given.models
        listed = json.loads(served.ask("GET", "/v1/models")[1])["data"]
        if len(listed) == 2:
            names = [entry["id"] for entry in listed]
        for name in names:
            completion(served, name, text(12, 1))
            alone = [completion(served, name, text(12, seed)) for seed in range(2, 2 + ALONE)]
            result[f"{name} alone"] = summary(alone)
        over = threading.Event()
        during: list[list[float]] = [[], []]
        clients = [
            threading.Thread(target=repeat, args=(served, name, over, found))
            for name, found in zip(names, during, strict=True)
        ]
        for client in clients:
            client.start()
        result["long prompt among others"] = round(
            completion(served, names[0], text(given.tokens, 7)), 1
        )
        over.set()
        for client in clients:
            client.join()
        for name, found in zip(names, during, strict=True):
            result[f"{name} during the prefill"] = summary(found)
        seconds = completion(served, names[0], text(given.tokens, 8))
        result["long prompt alone"] = round(seconds, 1)
        try:
            completion(served, names[0], text(given.tokens, 9), seconds / 2)
        except (TimeoutError, http.client.HTTPException):
            time.sleep(2)
            again = completion(served, names[0], text(given.tokens, 9))
            result["sent again after a cancelled half"] = round(again, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
