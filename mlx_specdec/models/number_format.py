"""Which numbers a model is computed in: those that a user names, or the stored ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..checkpoints import disk as sizes
from ..checkpoints.quantization import DTYPES, PARTS, check_affine
from ..errors import OptionError

EXPANDED_SHARE = 0.25
"""The share of the memory that a model may take in float32 where its quantized weights are expanded
on the CPU. MLX's quantized kernels for CPUs cost nearly as much per row as one pass over all
weights, so several rows at once gain nothing."""
TOLD_ABOVE = 1 << 28
"""Bytes in float32 of a model for which what was chosen is said."""


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


@dataclass(frozen=True)
class NumberFormat:
    """What is asked for. dtype: "auto" is float32 on the CPU, where half precision is slower, and
    as stored elsewhere. q_bits: quantize on load, in groups of q_group_size. expand: compute with
    whole weights where the stored ones are quantized; None for where that is faster and there is
    memory. Raises OptionError for what MLX does not have."""

    dtype: str = "auto"
    q_bits: int | None = None
    q_group_size: int = 64
    expand: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise OptionError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.q_bits is not None:
            check_affine(self.q_bits, self.q_group_size)

    def floating(self, stored: mx.Dtype) -> mx.Dtype:
        """The type of all weights that are stored as `stored`, and of the scales of those that are
        quantized: on the CPU, products with scales in half precision take 8 to 46 times as long."""
        if self.dtype != "auto":
            return getattr(mx, self.dtype)
        return mx.float32 if on_cpu() else stored

    def expands(self, weights: int) -> bool:
        """Whether a model of so many quantized weights is computed with whole ones."""
        if self.expand is not None:
            return self.expand
        room = EXPANDED_SHARE * sizes.memory()
        return self.dtype == "auto" and on_cpu() and weights * mx.float32.size < room

    def choice(self, name: str, network: nn.Module, stored: bool) -> str:
        """Return one line on how a large quantized model is computed with on a CPU, otherwise "".
        stored: whether the source's weights are quantized."""
        nbytes, quantized = count(network) * mx.float32.size, is_quantized(network)
        if not on_cpu() or nbytes < TOLD_ABOVE or not (stored or quantized):
            return ""
        size = sizes.show(nbytes)
        if not quantized:
            return (
                f"{name}: its quantized weights are expanded to {size}, which is faster on a CPU; "
                "--no-expand-weights saves the memory"
            )
        way = "--expand-weights computes" if self.q_bits is None else "without --q-bits it computes"
        return (
            f"{name}: its weights stay quantized; on a CPU a pass over several tokens then costs "
            f"nearly as much as one for each, so drafts gain little; {way} in float32, in {size}"
        )

    def check_plain(self, name: object, stored: object) -> None:
        """Raises OptionError where what is quantized as `stored` says would be quantized again."""
        if stored and self.q_bits is not None:
            raise OptionError(f"{name} is quantized already: leave the number of bits out")


def stored_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """What config.json says its weights are; float32 where it is silent."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        said = str(part.get("dtype") or part.get("torch_dtype") or "").rpartition(".")[2]
        if said in DTYPES:
            return getattr(mx, said)
    return mx.float32


def is_quantized(network: nn.Module) -> bool:
    """Return whether any matrix of the network is quantized."""
    return any(hasattr(module, "bits") for module in network.modules())


def count(network: nn.Module) -> int:
    """Count the weights of a network, without scales; packed weights count one by one."""
    quantized = [module for module in network.modules() if hasattr(module, "bits")]
    bits = {id(module.weight): module.bits for module in quantized}
    left_out = {id(module.get(part)) for module in quantized for part in PARTS}
    arrays = [array for _, array in tree_flatten(network.parameters()) if id(array) not in left_out]
    return sum(32 * array.size // bits.get(id(array), 32) for array in arrays)


def evaluate(network: nn.Module) -> None:
    """Compute the weights one after the other, so that memory holds the inputs of only one of them
    at a time."""
    for _, array in tree_flatten(network.parameters()):
        mx.eval(array)
        mx.clear_cache()


def expanded(module: nn.QuantizedLinear | nn.QuantizedEmbedding) -> nn.Module:
    """The plain layer that a quantized one was made of, as far as its bits tell."""
    weight = mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
    plain: nn.Module
    if isinstance(module, nn.QuantizedEmbedding):
        plain = nn.Embedding(1, 1)
    else:
        plain = nn.Linear(1, 1, bias="bias" in module)
        if "bias" in module:
            plain.bias = module.bias
    plain.weight = weight
    return plain


def twin_of(network: nn.Module) -> nn.Module:
    """Another tree of modules over the same arrays: what is put into one is not in the other."""
    twin: nn.Module = _twin(network, {})
    return twin


def _twin(part: Any, known: dict[int, Any]) -> Any:
    """The same tree of modules over the same arrays; what is shared in one is in the other."""
    if id(part) in known:
        return known[id(part)]
    if isinstance(part, nn.Module):
        other = known[id(part)] = copy.copy(part)
        for name, value in part.items():
            other[name] = _twin(value, known)
        return other
    if isinstance(part, list):
        return [_twin(value, known) for value in part]
    if isinstance(part, dict):
        return {name: _twin(value, known) for name, value in part.items()}
    return part


_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def dequantize(network: nn.Module) -> None:
    """Quantized layers become plain ones, and every floating array float32, in place.

    Raises OptionError for quantized layers of a kind that is not known.
    """
    plain = [
        (path, expanded(m)) for path, m in network.named_modules() if isinstance(m, _QUANTIZED)
    ]
    network.update_modules(tree_unflatten(plain))
    left = next((path for path, module in network.named_modules() if hasattr(module, "bits")), None)
    if left is not None:
        raise OptionError(
            f"{left} is quantized in a way that cannot be trained: dequantize the model"
        )
    wide = tree_map(
        lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
        network.parameters(),
    )
    network.update(wide)
    mx.eval(network.parameters())
