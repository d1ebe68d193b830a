"""What speculation brings to a server under load, against the same server without it.

    python scripts/measure_serving.py [--repeats 5] [--clients 1,4,16]

Serves the shipped Python pair twice, as it comes and with --regular-decode, and asks both the same
requests in turns, whoever was second going first next; the one that is not asked sleeps. Both are
warm: each number of clients has sent as many requests before. Prints a line of JSON for each load
as it ends, and one for each number of clients at last: medians over the repeats, and the ratio of
the requests a second in each repeat. The exit code is 1 where a request failed, or texts differ.
Five repeats take five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from typing import Any

from load_server import Heard, body_of, figures, load
from served import Served, serving

PORTS = {"auto": 8094, "plain": 8095}
FLAGS = {"auto": [], "plain": ["--regular-decode"]}
LEAST = 8
EACH = 3
"""Requests in a load: so many for each client, and at least that many."""
Loads = dict[int, dict[str, list[dict[str, Any]]]]


def burst(served: Served, clients: int, repeat: int) -> tuple[list[Heard], dict[str, Any]]:
    """A load of its own for each repeat, the same one for whoever serves; nobody leaves early."""
    count = max(LEAST, EACH * clients)
    bodies = [body_of(10_000 * repeat + number, seeds=True) for number in range(count)]
    heard, seconds = load(served, bodies, clients, leaves=0)
    return heard, figures(heard, seconds)


def measure(servers: dict[str, Served], clients: list[int], repeats: int) -> tuple[Loads, bool]:
    """All loads by clients and server, and whether every text was the same in both."""
    loads: Loads = {each: defaultdict(list) for each in clients}
    same = True
    for repeat in range(repeats + 1):
        for count in clients:
            order = [*servers] if repeat % 2 else [*servers][::-1]
            texts = {}
            for name in order:
                heard, told = burst(servers[name], count, repeat)
                texts[name] = [each.text for each in heard]
                problems = [each.problem for each in heard if each.problem]
                same = same and not problems
                warm = "warming" if repeat == 0 else repeat
                line = {"repeat": warm, "clients": count, "server": name, "problems": problems[:3]}
                print(json.dumps({**line, **told}), flush=True)
                if repeat:
                    loads[count][name].append(told)
            same = same and texts["auto"] == texts["plain"]
    return loads, same


def summary(loads: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each server, and the ratio of their requests a second."""
    seconds = {name: [each["seconds"] for each in own] for name, own in loads.items()}
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["auto"], strict=True)]
    told: dict[str, Any] = {
        "auto_over_plain": {
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
    }
    for name, own in loads.items():
        rates = [each["requests_per_second"] for each in own]
        told[name] = {"requests_per_second": statistics.median(rates)}
        for what in ("first_token", "between_tokens"):
            for cut in ("p50_ms", "p99_ms"):
                values = [each[what][cut] for each in own if each[what]]
                told[name][f"{what}_{cut}"] = round(statistics.median(values), 1)
    return told


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", default="1,4,16", help="how many at once")
    asked = parser.parse_args()
    clients = [int(each) for each in asked.clients.split(",")]
    pair = ["--model", "weights/py-llama", "--draft-model", "weights/py-llama-draft"]
    own = [sys.executable, "-m", "mlx_specdec", "serve", *pair, "--log-level", "warning", "--port"]
    commands = {name: [*own, str(PORTS[name]), *FLAGS[name]] for name in PORTS}
    with (
        serving(commands["auto"], PORTS["auto"]) as auto,
        serving(commands["plain"], PORTS["plain"]) as plain,
    ):
        loads, same = measure({"auto": auto, "plain": plain}, clients, asked.repeats)
    for count in clients if asked.repeats else ():
        print(json.dumps({"clients": count, **summary(loads[count])}))
    print(json.dumps({"same_texts": same}))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
