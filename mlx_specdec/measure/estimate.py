"""Computes the memory and the speedup of a pair from configurations and the headers of weights.

The time of a pass is the number of bytes that it reads, divided by the bandwidth that a probe
measures. With n draft tokens in a round, the speedup over plain decoding is

    S(n) = (1 + a + .. + a ** n) / (n c + V(n + 1))

where a is the probability that a draft token is accepted. In plain steps, c is the cost of a draft
step, and V(m) is the cost of a pass of the target over m tokens."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints.disk import read_json
from ..checkpoints.files import LAYER_COUNT_KEYS, Weights, read_config
from ..checkpoints.source import as_directory, resolve, temporary_directory
from ..checkpoints.tensors import DTYPES, dtype_name
from ..core.worth import values
from ..errors import OptionError
from ..models.drafters.kinds import kind_of
from ..models.loading import is_encoder_decoder
from ..models.number_format import NumberFormat, evaluate, nbytes, on_cpu, stored_dtype
from ..system import usable_memory

ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""The rates to show the gain for. The pair's own rate is unknown."""
DRAFT_LENGTHS = (0, 1, 2, 4, 8)
"""The numbers of draft tokens that are compared."""
GENERATED = 128
"""The number of generated tokens for which the memory of the caches is computed."""
MATRICES = ((64, 4096), (4, 2048))
"""The number and the width of the matrices of the probe, on a GPU and on a CPU, which may take long
for them. They are larger than the caches of processors."""
ONE_PASS = ("dflash", "dflash2", "dspark", "peagle")
"""The kinds of drafters that draft all tokens of a round in one pass."""


@dataclass(frozen=True)
class Side:
    """The memory and the reads of one of the two models.

    Attributes:
        kind: "encoder-decoder", "decoder-only", or the kind of a hidden-state drafter.
        bits, dtype: The bits of quantized weights (None without any), and the dtype of the others.
        weights_bytes, caches_bytes: The memory of the weights, and of the caches of one sequence.
        step_bytes: The bytes that a pass over one token reads.
        head_bytes: The bytes of the head, which drafters without a head read as well.
        experts_bytes, routed: The bytes of all experts, and the share of them that a token uses.
    """

    name: str
    kind: str
    bits: int | None
    dtype: str
    weights_bytes: int
    caches_bytes: int
    step_bytes: int
    head_bytes: int
    experts_bytes: int
    routed: float

    def seconds(self, rows: int = 1) -> float:
        """Return the time of a pass over some tokens, each of which may use other experts."""
        more = self.experts_bytes * (1 - self.routed - (1 - self.routed) ** rows)
        return (self.step_bytes + more) * probe(self.bits, self.dtype)[rows]


def side(
    name: str, revision: str | None, numbers: NumberFormat, prompt: int, shared_head: int = 0
) -> Side:
    """Return what a model takes. Of a repository on the Hub, config.json and the headers of the
    weights are downloaded. Raises SourceError, CheckpointError and OptionError.

    Args:
        prompt: The number of tokens of the prompt.
        shared_head: The bytes of the target's head, which a drafter without a head reads."""
    with temporary_directory() as place:
        source = resolve(name, revision=revision, headers_in=Path(place), whole=False)
        with as_directory(source) as directory:
            drafter = kind_of(directory)
            config = read_json(directory / "config.json") if drafter else read_config(directory)
            infos = Weights(directory).infos
    stored, encodes = config.get("quantization") or {}, is_encoder_decoder(config)
    numbers.check_plain(name, stored)
    dtype, bits = numbers.floating(stored_dtype(config)), stored.get("bits", numbers.q_bits)
    width = float(dtype.size)
    if numbers.q_bits:  # a group of weights has a scale and a bias
        width = numbers.q_bits / 8 + 2 * dtype.size / numbers.q_group_size
    words = {path: info.nbytes for path, info in infos.items() if info.dtype == "U32"}
    packed = {path: 8 * nbytes // (bits or 32) for path, nbytes in words.items()}
    expands = packed and numbers.expands(sum(packed.values()))
    sizes = {}
    for path, info in infos.items():
        stored_type = DTYPES[info.dtype]
        if expands and path in packed:
            bits, sizes[path] = None, packed[path] * width
        elif expands and path.endswith((".scales", ".biases")):
            sizes[path] = 0
        elif mx.issubdtype(stored_type, mx.floating):
            sizes[path] = info.nbytes // stored_type.size * width
        else:
            sizes[path] = info.nbytes
    for part in ("text_config", "decoder", "transformer_layer_config"):
        config |= config.get(part) or {}

    def total(pattern: str) -> int:
        return round(sum(size for path, size in sizes.items() if re.search(pattern, path)))

    weights, experts = total(""), total(r"\.(experts|switch_mlp)\.")
    embedding = total(r"(^|\.)(embed_tokens|shared|wte|embed_in|tok_embeddings)\.")
    head = total(r"(^|\.)(lm_head|embed_out|output)\.")
    used = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
    routed = used / (_first(config, "num_local_experts", "num_experts", "n_routed_experts") or 1)
    caches = _caches(config, prompt, encodes) * dtype.size
    step = weights + caches - round(experts * (1 - routed)) - total(r"^(model\.)?encoder\.")
    # A step reads a row of the embedding, unless it is the head as well.
    step -= embedding if head or drafter else 0
    step += shared_head if drafter and not head else 0
    kind = drafter or ("encoder-decoder" if encodes else "decoder-only")
    memory = weights, caches, step, head or embedding, experts
    return Side(name, kind, bits, dtype_name(dtype), *memory, routed)


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of some sizes in config.json, or else 0."""
    return next((config[name] for name in names if type(config.get(name)) is int), 0)


def _caches(config: Mapping[str, Any], prompt: int, encodes: bool) -> int:
    """Return how many numbers are in the KV caches. A layer with a window keeps no more than its
    tokens. The states of recurrent layers do not grow, and are left out."""
    heads = _first(config, "decoder_attention_heads", "num_attention_heads", "num_heads", "n_head")
    width = _first(config, "head_dim", "d_kv")
    width = width or _first(config, "hidden_size", "d_model", "n_embd") // max(1, heads)
    row = 2 * (_first(config, "num_key_value_heads") or heads) * width
    if latent := _first(config, "kv_lora_rank"):
        row = latent + _first(config, "qk_rope_head_dim")
    depth = _first(config, "num_decoder_layers", "decoder_layers", *LAYER_COUNT_KEYS)
    tokens = GENERATED if encodes else prompt + GENERATED
    kinds = config.get("layer_types") or ["full_attention"] * depth
    columns = tokens * kinds.count("full_attention") + (depth * prompt if encodes else 0)
    window = min(tokens, _first(config, "sliding_window") or tokens)
    return row * (columns + window * kinds.count("sliding_attention"))


@cache
def probe(bits: int | None, dtype: str) -> dict[int, float]:
    """Measure for a second the products of matrices with the rows of each of DRAFT_LENGTHS. Return
    the seconds for each byte of the matrices, by the number of rows."""
    count, width = MATRICES[on_cpu()]
    network = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    network.set_dtype(getattr(mx, dtype))
    if bits is not None:
        nn.quantize(network, bits=bits)
    evaluate(network)
    taken: dict[int, list[float]] = {n + 1: [] for n in DRAFT_LENGTHS}
    end = time.perf_counter() + 1
    while not taken[1] or time.perf_counter() < end:
        for rows, times in taken.items():
            started = time.perf_counter()
            mx.eval(network(mx.zeros((rows, width), dtype=getattr(mx, dtype))))
            times.append(time.perf_counter() - started)
    return {rows: min(times) / nbytes(network) for rows, times in taken.items()}


def estimate(
    names: tuple[str, str], revision: str | None, numbers: Sequence[NumberFormat], prompt: int
) -> dict[str, Any]:
    """Return what a pair takes and gains. Raises as `side` does, and OptionError if the draft
    cannot draft for the target.

    Args:
        names: The names of target and draft.
        revision: The revision of the target.
        numbers: The number formats of target and draft.
        prompt: The number of tokens of the prompt."""
    target = side(names[0], revision, numbers[0], prompt)
    draft = side(names[1], None, numbers[1], prompt, target.head_bytes)
    whole = "decoder-only", "encoder-decoder"
    if target.kind not in whole or (draft.kind in whole and draft.kind != target.kind):
        raise OptionError(
            f"{draft.name} ({draft.kind}) cannot draft for {target.name} ({target.kind}): give a "
            "whole model as the target, and a draft of the target's own kind"
        )
    need = sum(one.weights_bytes + one.caches_bytes for one in (target, draft))
    fits = need <= (limit := usable_memory())
    return {
        "target": asdict(target),
        "draft": asdict(draft),
        "memory_bytes": need,
        "memory_limit_bytes": limit,
        "fits": fits,
        "gains": gains(target, draft) if fits else [],
    }


def gains(target: Side, draft: Side) -> list[dict[str, float]]:
    """Return the number of draft tokens with the largest speedup at each of ACCEPTANCE_RATES."""
    found, step = [], target.seconds()
    for rate in ACCEPTANCE_RATES:
        lengths = range(max(DRAFT_LENGTHS) + 1)
        costs = [math.inf for _ in lengths]
        for n in DRAFT_LENGTHS:
            passes = min(n, 1) if draft.kind in ONE_PASS else n
            costs[n] = passes * draft.seconds() + target.seconds(n + 1)
        chances = [rate**n for n in lengths[1:]]
        speeds = dict(zip(lengths, values(chances, costs), strict=True))
        best = max(speeds, key=speeds.__getitem__)
        gain = {"acceptance_rate": rate, "num_draft": best, "speed_up": speeds[best] * step}
        found.append({**gain, "tokens_per_second": speeds[best]})
    return found
