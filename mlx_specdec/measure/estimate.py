"""Computes what a pair takes and what it gains, from configurations and the headers of weights.

The time of a pass is the number of bytes that it reads, divided by the bandwidth that a probe of
one matrix measures. With n draft tokens in a round, the speedup over plain decoding is

    S(n) = (1 + a + .. + a ** n) / (n c + V(n + 1))

where a is the probability that a draft token is accepted. c is the cost of a draft step and V(m)
the cost of a pass of the target over m tokens, in plain steps."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoints import files
from ..checkpoints.disk import read_json
from ..checkpoints.source import as_directory, resolve, temporary_directory
from ..checkpoints.tensors import DTYPES, dtype_name
from ..models.drafters.kinds import kind_of
from ..models.families import is_encoder_decoder
from ..models.number_format import NumberFormat, nbytes, on_cpu, stored_dtype

RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance rates to show the gain for. The pair's own rate is unknown."""
LONGEST = 8
"""The largest number of draft tokens of an estimate."""
GENERATED = 128
"""Tokens after the prompt for which the caches have room."""
WIDTHS = (4096, 2048)
"""Rows and columns of a matrix of the probe, on a GPU and on a CPU, which may take long for it."""
MATRICES = 64
"""The largest number of matrices of the probe. They are larger than the caches of processors."""
PRODUCTS_SECONDS = 0.02
"""Seconds that the products of one row with all matrices may take."""
BLOCKS = ("dflash", "dflash2", "dspark", "peagle")
"""The kinds of drafters that draft all tokens of a round in one pass."""
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|shared|wte|embed_in|tok_embeddings)\.")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
_EXPERT = re.compile(r"\.(experts|switch_mlp)\.")
_ENCODER = re.compile(r"(model\.)?encoder\.")


@dataclass(frozen=True)
class Side:
    """What one of the two models takes.

    Attributes:
        kind: "encoder-decoder", "decoder-only", or the kind of a hidden-state drafter.
        numbers: The bits of quantized weights (None without any), and the dtype of the others.
        weights_bytes, caches_bytes: The memory of the weights, and of the caches of one sequence.
        step_bytes: The bytes that a pass over one token reads, without the routed experts.
        experts_bytes, routed: The bytes of all experts, and the share of them that a token uses.
        head_bytes: The bytes of the head, which a hidden-state drafter shares with the target.
    """

    name: str
    kind: str
    numbers: tuple[int | None, mx.Dtype]
    weights_bytes: int
    caches_bytes: int
    step_bytes: int
    experts_bytes: int
    routed: float
    head_bytes: int

    def read(self, rows: int) -> float:
        """Return the bytes that a pass reads. Each of its rows may use other experts."""
        return self.step_bytes + self.experts_bytes * (1 - (1 - self.routed) ** rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of --json."""
        bits, dtype = self.numbers
        shown = "" if bits is None else f"{bits}-bit, "
        sizes = {"weights_bytes": self.weights_bytes, "caches_bytes": self.caches_bytes}
        step = round(self.read(1))
        return {"name": self.name, "dtype": shown + dtype_name(dtype), **sizes, "step_bytes": step}


def side(name: str, revision: str | None, numbers: NumberFormat, prompt_tokens: int) -> Side:
    """Return what a model takes. Of a repository on the Hub, config.json and the headers of the
    weights are downloaded. Raises SourceError, CheckpointError and OptionError."""
    with temporary_directory() as place:
        source = resolve(name, revision=revision, headers_in=Path(place), whole=False)
        with as_directory(source) as directory:
            kind, config = kind_of(directory), read_json(directory / "config.json")
            if kind is None:
                config = files.read_config(directory)
                decodes = not is_encoder_decoder(config)
                kind = "decoder-only" if decodes else "encoder-decoder"
            infos = files.Weights(directory).infos
    stored = config.get("quantization")
    packed = stored if isinstance(stored, Mapping) else {}
    numbers.check_plain(name, packed)
    dtype = numbers.floating(stored_dtype(config))
    count = {path: _count(infos, path, packed) for path in infos}
    expands = bool(packed) and numbers.expands(sum(count.values()))
    bits = numbers.q_bits or (None if expands else packed.get("bits"))
    sizes = {}
    for path, info in infos.items():
        matrix = len(info.shape) > 1 and info.shape[-1] % numbers.q_group_size == 0
        if numbers.q_bits is not None and matrix:
            groups = count[path] // numbers.q_group_size
            sizes[path] = count[path] * numbers.q_bits // 8 + 2 * groups * dtype.size
        elif expands:
            sizes[path] = count[path] * dtype.size
        else:
            is_float = mx.issubdtype(DTYPES[info.dtype], mx.floating)
            sizes[path] = prod(info.shape) * dtype.size if is_float else info.nbytes
    return Side(name, kind, (bits, dtype), *_summed(sizes, config, kind, prompt_tokens, dtype))


def _count(infos: Mapping[str, Any], path: str, packed: Mapping[str, Any]) -> int:
    """Return the number of weights of a tensor; 0 for the scales and biases of quantized ones."""
    module, _, part = path.rpartition(".")
    shape = infos[path].shape
    if f"{module}.scales" not in infos:
        return prod(shape)
    if part != "weight":
        return 0 if part in ("scales", "biases") else prod(shape)
    how = packed.get(module)
    bits = how["bits"] if isinstance(how, Mapping) else packed.get("bits", 4)
    return prod(shape) * 32 // int(bits)


def _summed(
    sizes: Mapping[str, int], config: Mapping[str, Any], kind: str, prompt: int, dtype: mx.Dtype
) -> tuple[int, int, int, int, float, int]:
    """Return the fields of a `Side` after its numbers. sizes: The bytes of each tensor."""

    def total(chosen: Callable[[str], object]) -> int:
        return sum(nbytes for path, nbytes in sizes.items() if chosen(path))

    tables, head = total(_EMBEDDING.search), total(_HEAD.search)
    experts = total(_EXPERT.search)
    text = inner(config)
    used = text("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    routed = used / max(1, text("num_local_experts", "num_experts", "n_routed_experts"))
    # A pass looks up rows of the embedding, and reads it whole only if it is the head as well.
    unread = experts + total(lambda path: kind == "encoder-decoder" and _ENCODER.match(path))
    unread += tables if head else 0
    caches = caches_nbytes(config, kind == "encoder-decoder", prompt, GENERATED, dtype.size)
    weights = sum(sizes.values())
    return weights, caches, weights - unread + caches, experts, routed, head or tables


def inner(config: Mapping[str, Any]) -> Callable[..., int]:
    """Return a function that returns the first of some sizes in config.json, or else 0."""
    merged = dict(config)
    for part in ("text_config", "decoder", "transformer_layer_config"):
        merged |= config[part] if isinstance(config.get(part), Mapping) else {}
    return lambda *names: next((merged[n] for n in names if type(merged.get(n)) is int), 0)


def caches_nbytes(
    config: Mapping[str, Any], encodes: bool, prompt: int, generated: int, width: int
) -> int:
    """Return the bytes of keys and values. Layers with a window keep no more than its tokens, and
    the states of recurrent layers, which do not grow, are left out. width: Bytes of a number."""
    of, text = inner(config), {**config, **(config.get("text_config") or {})}
    heads = of("decoder_attention_heads", "num_attention_heads", "num_heads", "n_head")
    head = of("head_dim", "d_kv") or of("hidden_size", "d_model", "n_embd") // max(1, heads)
    row = 2 * (of("num_key_value_heads") or heads) * head
    if latent := of("kv_lora_rank"):
        row = latent + of("qk_rope_head_dim")
    depth = of("num_decoder_layers", "decoder_layers", *files.LAYERS)
    tokens = generated if encodes else prompt + generated
    window = of("sliding_window") or tokens
    kept = {"full_attention": tokens, "sliding_attention": min(tokens, window)}
    kinds = text.get("layer_types") or ["full_attention"] * depth
    columns = sum(kept.get(kind, 0) for kind in kinds) + (depth * prompt if encodes else 0)
    return columns * row * width


def probe(numbers: tuple[int | None, mx.Dtype], seconds: float = 1.0) -> dict[int, float]:
    """Return the seconds for each byte of a matrix with these numbers that a product of one row
    takes, and of some more rows. The measurement takes about `seconds` seconds."""

    def made() -> nn.Module:
        layer: nn.Module = nn.Linear(width, width, bias=False)
        layer.set_dtype(numbers[1])
        if numbers[0] is not None:
            layer = nn.QuantizedLinear.from_linear(layer, bits=numbers[0])
        mx.eval(layer.parameters())
        return layer

    def timed(rows: int) -> float:
        x = mx.zeros((rows, width), dtype=numbers[1])
        started = time.perf_counter()
        for layer in layers:
            x = layer(x)
        mx.eval(x)
        return time.perf_counter() - started

    width = WIDTHS[on_cpu()]
    layers = [made()]
    first = min(timed(1) for _ in range(3))
    layers += [made() for _ in range(min(MATRICES, int(PRODUCTS_SECONDS / first)) - 1)]
    taken: dict[int, list[float]] = {rows: [] for rows in (1, 2, 3, 5, LONGEST + 1)}
    end = time.perf_counter() + seconds
    while not taken[1] or time.perf_counter() < end:
        for rows, times in taken.items():
            times.append(timed(rows))
    total = sum(map(nbytes, layers))
    return {rows: median(times) / total for rows, times in taken.items()}


@dataclass(frozen=True)
class Gain:
    """The number of draft tokens with the largest speedup at an acceptance rate."""

    acceptance_rate: float
    num_draft: int
    speed_up: float


@dataclass(frozen=True)
class Speeds:
    """The seconds of a plain step, the costs c and V(1), V(2), .. in plain steps, and the gains."""

    step_seconds: float
    draft_cost: float
    passes: Sequence[float]
    gains: Sequence[Gain]


def speeds(target: Side, draft: Side, rates: Mapping[Any, Mapping[int, float]]) -> Speeds:
    """Return the speeds of a pair. rates: The results of `probe`, by numbers."""

    def seconds(model: Side, rows: int, more: int = 0) -> float:
        found = rates[model.numbers]
        return (model.read(rows) + more) * float(np.interp(rows, [*found], [*found.values()]))

    step = seconds(target, 1)
    shared = 0 if draft.kind == target.kind else target.head_bytes
    cost = seconds(draft, 1, shared) / step
    passes = [seconds(target, rows) / step for rows in range(1, LONGEST + 2)]
    gains = []
    for rate in RATES:
        found = {0: 1.0}
        for n in range(1, LONGEST + 1):
            tokens = sum(rate**k for k in range(n + 1))
            found[n] = tokens / ((1 if draft.kind in BLOCKS else n) * cost + passes[n])
        best = max(found, key=found.__getitem__)
        gains.append(Gain(rate, best, found[best]))
    return Speeds(step, cost, passes, gains)
