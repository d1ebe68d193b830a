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

from mlx_specdec.assemble import Pair, generate
from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.many import generate_many
from mlx_specdec.models import t5_loading
from mlx_specdec.models.base import Base
from mlx_specdec.models.decoder_only import DecoderOnlyModel
from mlx_specdec.models.encoder_decoder import EncoderDecoderModel
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.models.sharding import refine
from mlx_specdec.models.t5 import T5
from mlx_specdec.options import Options

from ..test_same_text import PROMPT, pair_of, perturbed
from .test_joined import FIXTURES, built

Group = mx.distributed.Group | None
Texts = dict[str, list[int]]
WEIGHTS = Path(__file__).parents[2] / "weights"
SHIPPED = "the shipped Python model"
KINDS = ("own-head-scaled", "umt5-untied", "deep-decoder")
ASKED = {
    "max_tokens": 14,
    "temperature": 1.0,
    "frequency_penalty": 2.0,
    "seed": 3,
    "num_draft": 4,
    "proposer": "draft",
}
LONG = [5 + 11 * place % 50 for place in range(600)]


def four_heads(bits: int | None) -> T5:
    network = built(d_kv=32, num_heads=4, vocab_size=64)
    if bits is not None:
        nn.quantize(network, 32, bits, class_predicate=lambda p, m: isinstance(m, nn.Linear))
    return network


def shipped(group: Group) -> DecoderOnlyModel:
    """704 columns of it are quantized in groups of 64, an odd number of them."""
    network = load_model(WEIGHTS / "py-llama", dtype="float32").model.network
    if group is not None:
        refine(network, group.size())
        network.shard(group)
    return DecoderOnlyModel(network)


def targets(group: Group, ranks: int) -> dict[str, Base]:
    """By name; fixtures have two heads. Four ranks are slow where there are fewer cores."""
    made: dict[str, Base] = {}
    for bits in (None, 8) if ranks == 2 else (8,):
        network = four_heads(bits)
        if group is not None:
            network.shard(group)
        made[f"random, {bits} bits"] = EncoderDecoderModel(network)
    for kind in KINDS if ranks == 2 else ():
        directory, numbers = FIXTURES / kind, NumberFormat("float32")
        config = read_config(directory)
        made[kind] = t5_loading.load(directory, config, numbers, None, group=group)[0]
    if ranks == 2:
        made[SHIPPED] = shipped(group)
    return made


def draft_of(name: str) -> Base:
    if name == SHIPPED:
        return load_model(WEIGHTS / "py-llama-draft", dtype="float32").model
    if name.startswith("random"):
        network = four_heads(None)
    else:
        config, numbers = read_config(FIXTURES / name), NumberFormat("float32")
        network = t5_loading.load(FIXTURES / name, config, numbers, None)[0].network
    return EncoderDecoderModel(perturbed(network, 0.1))


def texts(group: Group, ranks: int) -> dict[str, Texts]:
    """Per target and per case the tokens; of one process without a group."""
    told: dict[str, Texts] = {}
    for name, target in targets(group, ranks).items():
        pair = replace(pair_of(target, draft_of(name)), vocabulary=target.vocabulary)

        def tokens(prompt: list[int], pair: Pair = pair, **changes: Any) -> list[int]:
            return [*generate(pair, prompt, Options(**{**ASKED, **changes})).tokens]

        told[name] = {
            "plain": tokens(PROMPT, regular=True),
            "drafted": tokens(PROMPT),
            "greedy": tokens(PROMPT, regular=True, temperature=0.0),
            "greedy, drafted": tokens(PROMPT, temperature=0.0),
        }
        if ranks > 2 or name == SHIPPED:
            continue
        batch = Options(**{**ASKED, "num_draft": 3})
        together = generate_many(pair, [PROMPT, LONG[:30], PROMPT[:3]], batch, batch_size=2)
        told[name] |= {
            "looked up": tokens(PROMPT, proposer="ngram"),
            "token by token": tokens(PROMPT, rule="token"),
            "in blocks": tokens(PROMPT, rule="block"),
            **({} if name != KINDS[0] else {"a long source": tokens(LONG)}),
            **{f"{row} of a batch": [*each.tokens] for row, each in enumerate(together)},
        }
    return told


def main() -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    told = texts(group, group.size())
    Path(sys.argv[1]).write_text(json.dumps(told))
    # Nobody leaves while others still listen.
    mx.eval(mx.distributed.all_sum(mx.ones(group.size()), group=group))


if __name__ == "__main__":
    main()
