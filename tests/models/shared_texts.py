"""What one of several processes that share a target writes; see `thread_ranks.run_ranks`.

Every rank has the draft; what is drafted follows from numbers that all ranks compute alike.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.engine.generate import generate, generate_many
from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.base import Base
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.models.sharding import refine
from mlx_specdec.models.t5 import family as t5_family
from mlx_specdec.models.t5.context import EncoderDecoderModel
from mlx_specdec.models.t5.network import T5
from mlx_specdec.options import Options

from ..support.pairs import PROMPT, pair_of, perturbed
from ..support.t5 import FIXTURES, built

Group = mx.distributed.Group | None
Texts = dict[str, list[int]]
WEIGHTS = Path(__file__).parents[2] / "weights"
SHIPPED = "the shipped Python model"
QUANTIZED = "random, 8 bits"
FIXTURE = "own-head-scaled"
ASKED = {
    "max_tokens": 14,
    "temperature": 1.0,
    "frequency_penalty": 2.0,
    "seed": 3,
    "num_draft": 4,
    "proposer": "draft",
}
LONG = [5 + 11 * place % 50 for place in range(600)]


def four_heads() -> T5:
    return built(d_kv=32, num_heads=4, vocab_size=64)


def shipped(group: Group) -> DecoderOnlyModel:
    """704 columns of it are quantized in groups of 64, an odd number of them."""
    network = load_model(WEIGHTS / "py-llama", dtype="float32").model.network
    if group is not None:
        refine(network, group.size())
        network.shard(group)
    return DecoderOnlyModel(network)


def targets(group: Group) -> dict[str, Base]:
    """By name."""
    network = four_heads()
    nn.quantize(network, 32, 8, class_predicate=lambda p, m: isinstance(m, nn.Linear))
    if group is not None:
        network.shard(group)
    directory = FIXTURES / FIXTURE
    config, numbers = read_config(directory), NumberFormat("float32")
    return {
        QUANTIZED: EncoderDecoderModel(network),
        FIXTURE: t5_family.load(directory, config, numbers, None, group=group)[0],
        SHIPPED: shipped(group),
    }


def draft_of(name: str) -> Base:
    if name == SHIPPED:
        return load_model(WEIGHTS / "py-llama-draft", dtype="float32").model
    if name == QUANTIZED:
        network = four_heads()
    else:
        config, numbers = read_config(FIXTURES / name), NumberFormat("float32")
        network = t5_family.load(FIXTURES / name, config, numbers, None)[0].network
    return EncoderDecoderModel(perturbed(network, 0.1))


def texts(group: Group) -> dict[str, Texts]:
    """Per target and per case the tokens; of one process without a group."""
    told: dict[str, Texts] = {}
    for name, target in targets(group).items():
        pair = replace(pair_of(target, draft_of(name)), vocabulary=target.vocabulary)

        def tokens(prompt: list[int], pair: Pair = pair, **changes: Any) -> list[int]:
            return [*generate(pair, prompt, Options(**{**ASKED, **changes})).tokens]

        told[name] = {
            "plain": tokens(PROMPT, regular=True),
            "drafted": tokens(PROMPT),
            "greedy": tokens(PROMPT, regular=True, temperature=0.0),
            "greedy, drafted": tokens(PROMPT, temperature=0.0),
        }
        if name == SHIPPED:
            continue
        batch = Options(**{**ASKED, "num_draft": 3})
        together = generate_many(pair, [PROMPT, LONG[:30], PROMPT[:3]], batch, batch_size=2)
        told[name] |= {
            "looked up": tokens(PROMPT, proposer="ngram"),
            "token by token": tokens(PROMPT, rule="token"),
            "in blocks": tokens(PROMPT, rule="block"),
            **({} if name != FIXTURE else {"a long source": tokens(LONG)}),
            **{f"{row} of a batch": [*each.tokens] for row, each in enumerate(together)},
        }
    return told


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    told = texts(group)
    Path(sys.argv[1]).write_text(json.dumps(told))
    # Nobody leaves while others still listen.
    mx.eval(mx.distributed.all_sum(mx.ones(group.size()), group=group))


if __name__ == "__main__":
    main()
