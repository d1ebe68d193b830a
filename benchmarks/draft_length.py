"""Judge `--num-draft auto`: replay recorded acceptance on machines with published cost curves.

    python benchmarks/draft_length.py [--seeds 20] [--lines]

Each cell is a recording of a pair (benchmarks/acceptance.json), a cost curve, and the cost of a
draft token. The pairs are the shipped ones, Qwen2.5-Coder 1.5B with 0.5B, and SmolLM2 135M with an
EAGLE-3 drafter, of which only the first draft token was recorded. The clock is virtual: seconds
have noise, stalls and drift, and the score is taken without them. A seed shuffles the texts. The
first reading of them is cold and the second one warm. Prints `auto` divided by the best fixed
length, and divided by plain decoding."""

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx

from mlx_specdec.core.proposer import Drafter
from mlx_specdec.core.statistics import Timed
from mlx_specdec.core.worth import Memory, Worth
from mlx_specdec.results import Step
from mlx_specdec.types import Proposal

RECORDED = Path(__file__).with_name("acceptance.json")
CURVES: dict[str, dict[int, float]] = {
    "M3 Ultra bf16": {1: 1.0, 2: 1.99, 16: 2.0},
    "M4 Pro 4-bit": {1: 1.0, 2: 0.99, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 16: 5.8},
    "M5 Max 4-bit": {1: 1.0, 3: 1.12, 5: 1.45, 8: 2.2, 16: 3.9},
    "two cores": {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.2, 16: 3.5},
}
"""Seconds of a target pass by rows, in passes over one row, with straight lines between. Published
in threads of ml-explore/mlx: 4265 (M3 Ultra), 3852 (M4 Pro), 3791 (M5 Max)."""
DRAFTS = (0.05, 0.15, 0.3)
"""Seconds per draft token, in plain steps."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16)
MAX_TOKENS = 96
DRAFT = Drafter("draft", lambda setup: NotImplemented, nbytes=1)
STEP = 0.02
"""Seconds of a plain step."""
NOISE, STALLS, STALLED, DRIFT, DRIFT_ROUNDS = 0.1, 0.01, 4.0, 0.15, 50
"""Standard deviation of the logarithm of a round's seconds, share of the rounds that stall, how
many times as long these take, standard deviation of the logarithm of the machine's speed, and
rounds in which it changes."""
FIRST = (6.0, 1.5, 1.2, 1.0)
"""How many times as long the first rounds of a source take in a process."""


@dataclass(frozen=True)
class Machine:
    """A cost curve, and the cost of a draft token."""

    curve: Mapping[int, float]
    draft: float

    def cost(self, count: int) -> float:
        """Return the plain steps of a round."""
        points, rows = sorted(self.curve), count + 1
        high = next((point for point in points if point >= rows), points[-1])
        low = points[max(0, points.index(high) - 1)]
        if high == low:
            high = points[1]
        rise = (self.curve[high] - self.curve[low]) / (high - low)
        return self.curve[low] + (rows - low) * rise + count * self.draft

    def slowness(self, dice: random.Random) -> Iterator[float]:
        """Yield the factors by which rounds take longer."""
        drift, share = dice.gauss(0, DRIFT), 1 - 1 / DRIFT_ROUNDS
        while True:
            stalled = STALLED if dice.random() < STALLS else 1.0
            yield stalled * math.exp(drift + dice.gauss(0, NOISE))
            drift = share * drift + math.sqrt(1 - share**2) * dice.gauss(0, DRIFT)


@dataclass
class Decoded:
    """What a draft length learns of a row."""

    committed: list[int]
    remaining: int
    prompt: tuple[int, ...] = (0,)


class Decoding:
    """The steps of decoding.loop.Group, without a model."""

    def __init__(self, machine: Machine, slowness: Iterator[float], first: Counter[bool]) -> None:
        self.clock, self._machine, self._slowness, self._rounds = 0.0, machine, slowness, first

    def run(self, lengths: Worth, text: str) -> None:
        """Decode a recorded sequence, which has "1" at each position where the draft is right."""
        at, in_flight = 0, False
        lengths.begin(0, 1, MAX_TOKENS)
        while at < len(text):
            drafted = lengths.choose(MAX_TOKENS - at)
            if in_flight:
                drafted, in_flight = 0, not drafted
            elif not drafted:
                in_flight = True
            right = text[at : at + drafted]
            accepted = len(right) - len(right.lstrip("1"))
            emitted = min(accepted + 1, len(text) - at)
            cost = self._machine.cost(drafted)
            self.clock += cost
            slow = FIRST[min(self._rounds[drafted > 0], len(FIRST) - 1)]
            self._rounds[drafted > 0] += 1
            ended = at + emitted == len(text)
            row = Decoded([0] * (1 + at + accepted + 1), MAX_TOKENS - at - emitted)
            step = Step(
                tokens=(0,) * emitted,
                drafted=min(drafted, emitted) if ended else drafted,
                accepted=min(accepted, emitted),
                finish_reason="length" if ended else None,
            )
            seconds = STEP * cost * slow * next(self._slowness)
            proposal = Proposal(mx.zeros((1, drafted), dtype=mx.int32))
            pipelined = in_flight and not drafted
            timed = Timed(seconds, interval=seconds, pipelined=pipelined)
            lengths.learn([row], [step], proposal, timed)
            at += emitted
        if in_flight:
            self.clock += self._machine.cost(0)  # the last pass is wasted


def fixed(machine: Machine, texts: Sequence[str], length: int) -> float:
    """Return the plain steps that a fixed draft length takes."""
    decoding = Decoding(machine, machine.slowness(random.Random(0)), Counter())
    for text in texts:
        decoding.run(Worth(length, [DRAFT]), text)
    return decoding.clock


def auto(machine: Machine, texts: Sequence[str], seed: int) -> tuple[float, float]:
    """Return the plain steps of the first and of the second reading of the texts."""
    dice, memory = random.Random(seed), Memory()
    slowness, first, clocks = machine.slowness(dice), Counter[bool](), []
    for _ in range(2):
        decoding = Decoding(machine, slowness, first)
        for text in dice.sample(texts, len(texts)):
            decoding.run(Worth(None, [DRAFT], memory), text)
        clocks.append(decoding.clock)
    return clocks[0], clocks[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--lines", action="store_true", help="print a line per cell")
    args = parser.parse_args()
    recorded = json.loads(RECORDED.read_text())
    cells = {**recorded, "always wrong": ["0" * 40] * 30}
    shares: dict[str, list[tuple[float, str]]] = {}
    for name, texts in cells.items():
        for curve, draft in ((curve, draft) for curve in CURVES for draft in DRAFTS):
            machine = Machine(CURVES[curve], draft)
            plain = fixed(machine, texts, 0)
            best, length = min((fixed(machine, texts, n), n) for n in (0, *LENGTHS))
            cell = f"{name}, {curve}, {draft:g}"
            runs = [auto(machine, texts, seed) for seed in range(args.seeds)]
            for kind, clocks in zip(("cold", "warm"), zip(*runs, strict=True), strict=True):
                mean = sum(clocks) / len(clocks)
                hopeless = ", nothing pays" if length == 0 else ""
                shares.setdefault(f"{kind}{hopeless}", []).append((best / mean, cell))
                shares.setdefault(f"{kind}, of plain", []).append((plain / mean, cell))
                if args.lines:
                    of_plain = f"{plain / mean:.3f} of plain: {kind}, {cell}"
                    print(f"{best / mean:.3f} of {length:2d}, {of_plain}")
    print("\n| | cells | mean | worst |\n|---|---|---|---|")
    for title, values in sorted(shares.items()):
        mean, (worst, cell) = sum(value for value, _ in values) / len(values), min(values)
        print(f"| {title} | {len(values)} | {mean:.3f} | {worst:.3f} ({cell}) |")


if __name__ == "__main__":
    main()
