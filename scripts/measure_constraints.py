"""What schemas cost and what they save: valid texts, CPU time a token, passes a token.

    python scripts/measure_constraints.py [--texts 500] [--timed 70]

The shipped Python pair writes texts that are bound to schemas, half of them greedily; each is
checked with jsonschema (`pip install jsonschema`). For the first of them the target then writes as
many tokens in turns: free, bound to a grammar that allows everything, bound to the schema plainly,
and bound with what is forced proposed. Times are CPU seconds of this process, prompts and grammars
included, so that other programs matter little; set OMP_NUM_THREADS=1. The last line is JSON; the
exit code is 1 where a text does not fit its schema, or drafts have changed one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_specdec import Options, Pair, generate, load
from mlx_specdec.decoding.run import Result

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
PROMPTS = (
    "def read(path):\n    return ",
    "config = ",
    "class Stack:\n    limits = ",
    "import json\n\nanswer = ",
    "# The last record:\n",
)
TEMPERATURES = (0.0, 0.8)
ANYTHING = r"(.|\n)*"
MOST = 300
NAME = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 120}
PRICE = {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5}
"""Without a step a number may have digits without end."""


def record(**properties: Any) -> dict[str, Any]:
    """An object that has just these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


SCHEMAS: list[dict[str, Any]] = [
    record(name=NAME, age=COUNT, active={"type": "boolean"}),
    record(tags={"type": "array", "items": NAME, "minItems": 1, "maxItems": 3}),
    record(kind={"enum": ["list", "tuple", None, 3]}, of=record(size=COUNT)),
    record(path={"type": "string", "pattern": "^[a-z]{1,8}/[a-z_]{1,8}\\.py$"}, lines=COUNT),
    {
        "anyOf": [
            record(error=NAME),
            record(result={"type": "array", "items": COUNT, "maxItems": 4}),
        ]
    },
    record(day={"type": "string", "format": "date"}, price=PRICE),
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(value=COUNT)},
    },
]


def asked(number: int) -> tuple[str, Options]:
    """Text `number`: no two have the same prompt, schema, temperature and seed."""
    rest, schema = divmod(number, len(SCHEMAS))
    rest, temperature = divmod(rest, len(TEMPERATURES))
    seed, prompt = divmod(rest, len(PROMPTS))
    # A greedy text has no seed; its prompt tells it from the others.
    options = Options(
        json_schema=SCHEMAS[schema],
        temperature=TEMPERATURES[temperature],
        seed=seed,
        max_tokens=MOST,
        cost_cache=False,
    )
    return f"# {seed}\n{PROMPTS[prompt]}", options


def timed(pair: Pair, prompt: str, options: Options) -> tuple[Result, float]:
    """A text, and the CPU seconds that it took."""
    began = time.process_time()
    result = generate(pair, prompt, options)
    return result, time.process_time() - began


class Methods:
    """The ways to write the same number of tokens, and what they took for each text."""

    def __init__(self, target: Pair) -> None:
        self.same = True
        self._target = target
        self._ms: dict[str, list[float]] = {}
        self._passes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def write(self, prompt: str, options: Options) -> None:
        """One text in all ways."""
        plain = replace(options, regular=True)
        bound = self._one("schema", prompt, plain)
        for count in (4, 8):
            forced = self._one(f"forced_{count}", prompt, replace(options, num_draft=count))
            self.same = self.same and forced.text == bound.text
        unbound = replace(plain, json_schema=None, max_tokens=len(bound.tokens))
        free = self._one("free", prompt, unbound)
        anything = self._one("anything", prompt, replace(unbound, regex=ANYTHING))
        self.same = self.same and free.text == anything.text

    def _one(self, name: str, prompt: str, options: Options) -> Result:
        result, seconds = timed(self._target, prompt, options)
        count = max(1, len(result.tokens))
        self._ms.setdefault(name, []).append(1000 * seconds / count)
        self._passes[name] += result.stats.target_passes
        self._tokens[name] += len(result.tokens)
        return result

    def told(self) -> dict[str, Any]:
        """Milliseconds a token are medians over the texts, ratios medians of each text's."""
        free = self._ms["free"]
        return {
            name: {
                "cpu_ms_a_token": round(statistics.median(own), 2),
                "to_free": round(
                    statistics.median(a / b for a, b in zip(own, free, strict=True)), 3
                ),
                "tokens": self._tokens[name],
                "passes_a_token": round(self._passes[name] / self._tokens[name], 3),
            }
            for name, own in self._ms.items()
        }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--timed", type=int, default=70, help="texts that are written in all ways")
    given = parser.parse_args()
    from jsonschema import Draft202012Validator

    pair, target = (
        load(WEIGHTS / "py-llama", WEIGHTS / "py-llama-draft"),
        load(WEIGHTS / "py-llama"),
    )
    became: Counter[str] = Counter()
    texts: set[str] = set()
    tokens = passes = 0
    for number in range(given.texts):
        prompt, options = asked(number)
        result = generate(pair, prompt, replace(options, num_draft=4, proposer="auto"))
        tokens, passes = tokens + len(result.tokens), passes + result.stats.target_passes
        texts.add(result.text)
        if result.finish_reason == "length":
            became["cut"] += 1
            continue
        schema = Draft202012Validator(json.loads(str(options.json_schema)))
        became["valid" if schema.is_valid(json.loads(result.text)) else "invalid"] += 1
    methods = Methods(target)
    methods.write(*asked(0))  # warm
    methods = Methods(target)
    for number in range(given.timed):
        methods.write(*asked(number))
    told = {
        "texts": dict(became),
        "different_texts": len(texts),
        "with_draft_passes_a_token": round(passes / tokens, 3),
        "same_texts_in_all_ways": methods.same,
        **methods.told(),
    }
    print(json.dumps(told))
    sys.exit(1 if became["invalid"] or not methods.same else 0)


if __name__ == "__main__":
    main()
