"""Measure which layers of the target a hidden-state drafter should read, because the files of
drafters count layers in different ways:

    python benchmarks/probe.py DRAFTER --model TARGET [--prompts FILE]

Prints one JSON object with the acceptance rates for the layers that the files name, and for those
one lower and one higher, and with advice."""

import argparse
import copy
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec import SpecdecError, load, system

if __name__ == "__main__":
    system.load_blas()

import mlx.core as mx

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.opening import LEAST_ACCEPTED
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError
from mlx_specdec.models.base import layer_of
from mlx_specdec.text.prompts import read_prompts
from mlx_specdec.types import FINAL, Progress, after

SHIFTS = (0, -1, 1)
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "def read_numbers(path):\n    ",
    "What is the difference between a virus and a bacterium? Explain it step by step.",
    "The house is small, but the garden is large and full of old trees.",
    "Here is a list of the planets and what each of them is known for:",
    "A train leaves at nine and travels at 80 kilometres an hour. How far is it at noon?",
)
SETTINGS = Options(max_tokens=64, num_draft=4, cost_cache=False)
"""Settings of the measurement. They are greedy, so that the output is the same whichever layers the
drafter reads, and only the acceptance rate differs."""
DEVIATIONS = 2
"""Number of standard deviations by which another numbering must be better than the files' own."""


@dataclass(frozen=True)
class Numbering:
    """The acceptance counts for one choice of layers, which are counted from 0. `shift` is the
    difference to the layers that the files name. Of the rounds with draft tokens, `first` accepted
    the first one."""

    shift: int
    layers: tuple[int, ...]
    rounds: int
    first: int
    drafted: int
    accepted: int

    @property
    def first_rate(self) -> float:
        """The acceptance rate of the first draft token of a round."""
        return self.first / self.rounds

    @property
    def rate(self) -> float:
        """The acceptance rate of all draft tokens."""
        return self.accepted / self.drafted

    def as_dict(self) -> dict[str, Any]:
        """Return the payload of --json."""
        rates = {"first_token_acceptance": self.first_rate, "acceptance_rate": self.rate}
        return {**vars(self), "layers": list(self.layers), **rates}


@dataclass(frozen=True)
class Probe:
    """The counts of all numberings, the files' own one first. `texts` is the number of prompts."""

    model: str
    drafter: str
    kind: str
    texts: int
    numberings: tuple[Numbering, ...]

    @property
    def best(self) -> Numbering:
        """The numbering of the files, unless another one is clearly better."""
        named = self.numberings[0]
        best = max(self.numberings, key=lambda numbering: numbering.first_rate)
        variance = 0.0
        for numbering in (named, best):
            # Add one success and one failure, so that few rounds never look certain.
            share = (numbering.first + 1) / (numbering.rounds + 2)
            variance += share * (1 - share) / numbering.rounds
        deviation = math.sqrt(variance)
        return best if best.first_rate - named.first_rate > DEVIATIONS * deviation else named

    @property
    def fits(self) -> bool:
        """Whether the acceptance rate is high enough for a drafter that was made for the target."""
        return self.best.first_rate >= LEAST_ACCEPTED

    @property
    def advice(self) -> str:
        """A sentence for the user that says what to do."""
        if not self.fits:
            return (
                "hardly any draft token is accepted with any of these layers: the drafter was "
                "made for another target, or for the model that this one was fine-tuned from"
            )
        if self.best.shift == 0:
            return "the layers that its files name serve best: leave them as they are"
        key = "aux_hidden_state_layer_ids"
        key = f"eagle_{key}" if self.kind in ("eagle3", "peagle") else key
        by_input = [layer + 1 for layer in self.best.layers]
        return (
            f"the layers one {'higher' if self.best.shift > 0 else 'lower'} serve better: write "
            f'"{key}": {by_input} into the drafter\'s config.json, which names layers by their '
            "inputs"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the payload of --json."""
        return {
            **vars(self),
            "numberings": [numbering.as_dict() for numbering in self.numberings],
            "best_shift": self.best.shift if self.fits else None,
            "advice": self.advice,
        }


def probe(
    pair: Pair, prompts: Sequence[str] = PROMPTS, *, progress: Progress | None = None
) -> Probe:
    """Measure the acceptance of a hidden-state drafter with all possible layer numberings. Raises
    OptionError if there is nothing to compare."""
    network, report = pair.drafter_network, progress or (lambda done, total: None)
    if network is None:
        raise OptionError(f"{pair.draft_name} reads no hidden states: there are no layers to probe")
    if FINAL in network.hidden:
        raise OptionError(
            f"{pair.draft_name} reads what the target's head is given, which is counted in one "
            "way: there are no layers to probe"
        )
    depth = pair.target.layers
    named = [layer_of(name, depth) for name in network.hidden]
    choices = {shift: tuple(layer + shift for layer in named) for shift in SHIFTS}
    exist = {shift: ids for shift, ids in choices.items() if {*ids} <= {*range(depth)}}
    total, measured = len(exist) * len(prompts), []
    report(0, total)
    for turn, (shift, layers) in enumerate(exist.items()):
        moved = copy.copy(network)
        moved.hidden = tuple(map(after, layers))
        # A target that lacks these hidden states raises OptionError. Nothing is computed.
        pair.target.open_batch([[0]]).advance(mx.zeros((1, 1), dtype=mx.int32), hidden=moved.hidden)
        tried = replace(pair, drafter_network=moved)
        counts = [0, 0, 0, 0]
        for number, prompt in enumerate(prompts, start=1):
            stats = generate(tried, prompt, replace(SETTINGS, proposer=network.kind)).stats
            firsts = (*stats.drafted_by_position[:1], *stats.accepted_by_position[:1]) or (0, 0)
            added = (*firsts, stats.drafted, stats.accepted)
            counts = [sum(both) for both in zip(counts, added, strict=True)]
            report(turn * len(prompts) + number, total)
        if not counts[0]:
            raise OptionError(
                "nothing was drafted: the target's texts end at once, which other prompts may "
                "change, or it decodes without speculation"
            )
        measured.append(Numbering(shift, layers, *counts))
    return Probe(pair.name, str(pair.draft_name), network.kind, len(prompts), tuple(measured))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("drafter")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path)
    given = parser.parse_args()
    try:
        file = given.prompts
        prompts = PROMPTS if file is None else [one.turns[0] for one in read_prompts(file)]
        found = probe(load(given.model, given.drafter), prompts)
    except SpecdecError as problem:
        sys.exit(f"error: {problem}")
    print(json.dumps(found.as_dict(), indent=1))


if __name__ == "__main__":
    main()
