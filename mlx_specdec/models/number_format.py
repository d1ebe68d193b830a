"""The numbers that a model is computed in, and networks whose weights are quantized or not."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints import disk as sizes
from ..checkpoints.quantization import DTYPES, PARTS, check_affine
from ..errors import OptionError, check_one_of, first_line
from .wired_memory import wire

EXPANDED_SHARE = 0.25
"""The share of the memory that a model may take in float32 where its quantized weights are expanded
on the CPU. MLX's quantized kernels for CPUs cost nearly as much per row as one pass over all
weights, so several rows at once gain nothing."""
NOTED_ABOVE = 1 << 28
"""Bytes in float32 above which a note says how a quantized model is computed with."""


def on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


@dataclass(frozen=True)
class NumberFormat:
    """How the weights of a model are computed with. dtype: "auto" is float32 on the CPU, where half
    precision is slower. Elsewhere it is as stored, but bfloat16 in place of a float16 that is too
    small; see `floating`. q_bits: quantize on load, in groups of q_group_size. expand: compute with
    dequantized weights if the stored ones are quantized. None: if that is faster and there is
    memory. Raises OptionError for what MLX does not have."""

    dtype: str = "auto"
    q_bits: int | None = None
    q_group_size: int = 64
    expand: bool | None = None

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, ("auto", *DTYPES))
        if self.q_bits is not None:
            check_affine(self.q_bits, self.q_group_size)

    def floating(self, stored: mx.Dtype, *, overflows: bool = False) -> mx.Dtype:
        """Return the type for weights that are stored as `stored`, and for the scales of quantized
        ones: on the CPU, products with scales in half precision take 8 to 46 times as long.
        overflows: whether float16 is too small for the model's hidden states."""
        if self.dtype != "auto":
            return getattr(mx, self.dtype)
        if on_cpu():
            return mx.float32
        return mx.bfloat16 if overflows and stored == mx.float16 else stored

    def range_note(self, name: str, stored: mx.Dtype, used: mx.Dtype) -> str:
        """Return one line on `floating` if it has replaced float16 by bfloat16, otherwise ""."""
        if self.dtype != "auto" or (stored, used) != (mx.float16, mx.bfloat16):
            return ""
        return (
            f"{name}: its weights are stored in float16, whose range is too small for some models "
            "of this family, and computed with in bfloat16; --dtype float16 keeps float16"
        )

    def expands(self, weights: int) -> bool:
        """Return whether a model of so many quantized weights is computed with whole ones."""
        if self.expand is not None:
            return self.expand
        room = EXPANDED_SHARE * sizes.memory()
        return self.dtype == "auto" and on_cpu() and weights * mx.float32.size < room

    def choice(self, name: str, network: nn.Module, stored: bool) -> str:
        """Return one line on how a large quantized model is computed with on a CPU, otherwise "".
        stored: whether the source's weights are quantized."""
        size, quantized = count(network) * mx.float32.size, is_quantized(network)
        if not on_cpu() or size < NOTED_ABOVE or not (stored or quantized):
            return ""
        shown = sizes.show(size)
        if not quantized:
            return (
                f"{name}: its quantized weights are expanded to {shown}, which is faster on a CPU; "
                "--no-expand-weights saves the memory"
            )
        way = "--expand-weights computes" if self.q_bits is None else "without --q-bits it computes"
        return (
            f"{name}: its weights stay quantized; on a CPU a pass over several tokens then costs "
            f"nearly as much as one for each, so drafts gain little; {way} in float32, in {shown}"
        )

    def check_plain(self, name: object, stored: object) -> None:
        """Raise OptionError where quantized weights would be quantized again."""
        if stored and self.q_bits is not None:
            raise OptionError(f"{name} is quantized already: leave the number of bits out")


def stored_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """Return the type of the stored weights by config.json; float32 where it has none."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        said = str(part.get("dtype") or part.get("torch_dtype") or "").rpartition(".")[2]
        if said in DTYPES:
            return getattr(mx, said)
    return mx.float32


def is_quantized(network: nn.Module) -> bool:
    return any(hasattr(module, "bits") for module in network.modules())


def nbytes(network: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(network.parameters()))


def count(network: nn.Module) -> int:
    """Count the weights of a network, without scales; packed weights count one by one."""
    quantized = [module for module in network.modules() if hasattr(module, "bits")]
    bits = {id(module.weight): module.bits for module in quantized}
    left_out = {id(module.get(part)) for module in quantized for part in PARTS}
    arrays = [array for _, array in tree_flatten(network.parameters()) if id(array) not in left_out]
    return sum(32 * array.size // bits.get(id(array), 32) for array in arrays)


def evaluate(network: nn.Module) -> None:
    """Compute all arrays one after the other, so that memory holds the inputs of one at a time.
    Arrays under private names, which `parameters` leaves out, are computed too: MLX computes an
    array only in the thread that made it. At the end the wired limit is raised; see `wire`."""
    for _, leaf in tree_flatten(network):  # a module is a dict of its arrays and modules
        if isinstance(leaf, mx.array):
            mx.eval(leaf)
            mx.clear_cache()
    wire()


def quantize(
    network: nn.Module,
    bits: int,
    group_size: int,
    choose: Callable[[str, nn.Module], Any] = lambda path, module: True,
) -> None:
    """Quantize every matrix whose rows divide into groups, lazily. choose: whether, or how, by the
    path of a module. Raises OptionError where there is none."""

    def suits(path: str, module: nn.Module) -> Any:
        able = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        return able and choose(path, module)

    try:
        nn.quantize(network, group_size, bits, class_predicate=suits)
    except ValueError as problem:
        raise OptionError(f"cannot quantize to {bits} bits: {first_line(problem)}") from problem
    if not is_quantized(network):
        raise OptionError(f"no layer's width is a multiple of {group_size}: take a smaller group")


def expanded(module: nn.QuantizedLinear | nn.QuantizedEmbedding) -> nn.Module:
    how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    is_table = isinstance(module, nn.QuantizedEmbedding)
    plain: Any = nn.Embedding(1, 1) if is_table else nn.Linear(1, 1, bias=False)
    plain.weight = mx.dequantize(module.weight, module.scales, module.get("biases"), **how)
    if "bias" in module:
        plain.bias = module.bias
    return plain


def expand(network: nn.Module) -> None:
    known = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    plain = [(path, expanded(m)) for path, m in network.named_modules() if isinstance(m, known)]
    network.update_modules(tree_unflatten(plain))


def twin_of(network: nn.Module) -> nn.Module:
    """Return another tree of modules over the same arrays; an update of one leaves the other."""
    twin: nn.Module = _twin(network, {})
    return twin


def _twin(part: Any, known: dict[int, Any]) -> Any:
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


def dequantize(network: nn.Module) -> None:
    """Make quantized layers plain ones, and every floating array float32, in place. Raises
    OptionError for quantized layers of a kind that is not known."""
    network.set_dtype(mx.float32)  # exact values need scales in float32
    expand(network)
    left = next((path for path, module in network.named_modules() if hasattr(module, "bits")), None)
    if left is not None:
        raise OptionError(
            f"{left} is quantized in a way that cannot be trained: dequantize the model"
        )
    network.set_dtype(mx.float32)
    mx.eval(network.parameters())
