"""Record which draft tokens the shipped pairs accept, for benchmarks/draft_length.py.

    python benchmarks/record_acceptance.py [NAME MODEL DRAFT PROMPTS LIMIT]

Adds to benchmarks/acceptance.json, by default the shipped pairs. Each sequence is a string with one
character per position: "1" if the first draft token equals the target's, and "0" if not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec.core.options import Options
from mlx_specdec.engine.generate import stream_generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import make_rule
from mlx_specdec.text.prompts import read_prompts
from mlx_specdec.types import Noise, Proposal, Verdict

if TYPE_CHECKING:
    import mlx.core as mx

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 96
SHIPPED = (
    ("translation", "weights/t5-enfr", "weights/t5-enfr-draft", "translation.jsonl", "30"),
    ("Python", "weights/py-llama", "weights/py-llama-draft", "python.jsonl", "16"),
)


class Recording:
    """Rule that commits one token per round and records whether the first draft token was right."""

    def __init__(self, options: Options) -> None:
        self._rule, self.right = make_rule(options), ""

    def __call__(self, log_p: mx.array, proposal: Proposal, noise: Noise, delta: float) -> Verdict:
        verdict = self._rule(log_p, proposal, noise, delta)
        if not proposal.size:
            return verdict
        right = bool(verdict.accepted[0, 0].item())
        self.right += "01"[right]
        chosen = proposal.tokens[:, 0] if right else verdict.next
        return Verdict(mx.zeros(proposal.tokens.shape, dtype=mx.bool_), chosen)


def record(pair: Pair, prompt: str, temperature: float) -> str:
    """Return whether the draft model's token would be right at each position."""
    options = Options(
        max_tokens=TOKENS,
        num_draft=1,
        proposer="draft" if pair.draft is not None else None,
        temperature=temperature,
        cost_cache=False,
    )
    rule = Recording(options)
    with mock.patch("mlx_specdec.engine.opening.make_rule", lambda options: rule):
        tokens = stream_generate(pair, prompt, options).result().tokens
    return rule.right.ljust(len(tokens), "0")


def main() -> None:
    file = ROOT / "benchmarks" / "acceptance.json"
    texts: dict[str, list[str]] = json.loads(file.read_text())
    for name, model, draft, prompts, limit in [sys.argv[1:]] if sys.argv[1:] else SHIPPED:
        pair = load(str(ROOT / model), str(ROOT / draft))
        for temperature in (0.0, 1.0):
            read = read_prompts(ROOT / "prompts" / prompts, int(limit))
            cell = [record(pair, prompt.turns[0], temperature) for prompt in read]
            texts[f"{name}, T = {temperature:g}"] = cell
            print(name, temperature, len(cell), cell[0], flush=True)
    file.write_text(json.dumps(texts, indent=0) + "\n")


if __name__ == "__main__":
    main()
