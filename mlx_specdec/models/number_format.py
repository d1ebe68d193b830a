"""The dtype and the quantization of a model's weights."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .. import system
from ..checkpoints.files import Weights, text_config
from ..checkpoints.quantization import ALL_PARTS, FLOAT_DTYPES, PARTS, check_affine
from ..checkpoints.tensors import same
from ..errors import OptionError, check_one_of, first_line
from ..system import show_size
from .wired_memory import wire

EXPANDED_SHARE = 0.25
"""On the CPU, quantized weights are dequantized on load if they take at most this share of the
memory in float32. With MLX's quantized CPU kernels a pass over n rows takes nearly n times as long
as a pass over one row. Drafts would gain nothing."""
EXPANDED_AT_ONCE = 1 << 18
"""Bytes of quantized weights that are dequantized at a time."""
NOTED_ABOVE = 1 << 28
"""If a quantized model takes more than these bytes in float32, a note says whether its weights are
dequantized: 256 MiB."""


def on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


@dataclass(frozen=True)
class NumberFormat:
    """The dtype and the quantization in which a model's weights are computed.

    Attributes:
        dtype: "auto" is float32 on the CPU, because half precision is slower there. Elsewhere it
            is the stored dtype, or bfloat16 if float16 is too small; see `floating`.
        q_bits: Quantize on load to this number of bits; None does not quantize.
        q_group_size: Number of weights that share a scale.
        expand: Dequantize stored quantized weights on load. None does so if that is faster and the
            memory suffices.
    Raises:
        OptionError: If MLX does not support the values.
    """

    dtype: str = "auto"
    q_bits: int | None = None
    q_group_size: int = 64
    expand: bool | None = None

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, ("auto", *FLOAT_DTYPES))
        if self.q_bits is not None:
            check_affine(self.q_bits, self.q_group_size)

    def floating(self, stored: mx.Dtype, *, overflows: bool = False) -> mx.Dtype:
        """Return the dtype of the weights, and of the scales of quantized weights. On the CPU,
        products with scales in half precision take 8 to 46 times as long. `overflows` says whether
        float16 is too small for the model's hidden states."""
        if self.dtype != "auto":
            return getattr(mx, self.dtype)
        if on_cpu():
            return mx.float32
        return mx.bfloat16 if overflows and stored == mx.float16 else stored

    def range_note(self, name: str, stored: mx.Dtype, used: mx.Dtype) -> str:
        """Return a note if `floating` has replaced float16 by bfloat16, otherwise ""."""
        if self.dtype != "auto" or (stored, used) != (mx.float16, mx.bfloat16):
            return ""
        return (
            f"{name}: its weights are stored in float16, whose range is too small for some models "
            "of this family, and computed with in bfloat16; --dtype float16 keeps float16"
        )

    def expands(self, weights: int) -> bool:
        """Return whether a model with this number of quantized weights is dequantized on load."""
        if self.expand is not None:
            return self.expand
        most = EXPANDED_SHARE * system.memory()
        return self.dtype == "auto" and on_cpu() and weights * mx.float32.size < most

    def choice(self, name: str, network: nn.Module, stored: bool) -> str:
        """Return a note on whether a large quantized model on a CPU is dequantized, otherwise "".
        `stored` says whether the stored weights are quantized."""
        size, quantized = count(network) * mx.float32.size, is_quantized(network)
        if not on_cpu() or size < NOTED_ABOVE or not (stored or quantized):
            return ""
        shown = show_size(size)
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
        """Raise OptionError if quantized weights would be quantized again."""
        if stored and self.q_bits is not None:
            raise OptionError(f"{name} is quantized already: leave the number of bits out")


def stored_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """Return the dtype of the weights that config.json states, or float32 if it states none."""
    for part in (config, text_config(config)):
        name = str(part.get("dtype") or part.get("torch_dtype") or "").rpartition(".")[2]
        if name in FLOAT_DTYPES:
            return getattr(mx, name)
    return mx.float32


def same_matrix(first: str, second: str, weights: Weights) -> bool:
    """Return whether two matrices of a checkpoint have the same values, which may be quantized. The
    names are those of their tensors `weight`."""
    for part in ALL_PARTS:
        names = [name.removesuffix("weight") + part for name in (first, second)]
        found = [weights.tensor(name) for name in names if name in weights.infos]
        if len(found) == 1 or (found and not same(*found)):
            return False
    return True


def is_quantized(network: nn.Module) -> bool:
    return any(hasattr(module, "bits") for module in network.modules())


def nbytes(network: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(network.parameters()))


def count(network: nn.Module) -> int:
    """Return the number of weights of a network, without scales. Packed weights count singly."""
    quantized = [module for module in network.modules() if hasattr(module, "bits")]
    bits = {id(module.weight): module.bits for module in quantized}
    left_out = {id(module.get(part)) for module in quantized for part in PARTS}
    arrays = [array for _, array in tree_flatten(network.parameters()) if id(array) not in left_out]
    return sum(32 * array.size // bits.get(id(array), 32) for array in arrays)


def evaluate(network: nn.Module) -> None:
    """Compute all arrays one after the other, so that memory holds the inputs of only one array at
    a time. This includes arrays with private names, which `parameters` leaves out, because MLX
    computes an array only in the thread that made it. At the end, raise the wired limit; see
    `wire`.

    MLX's layers draw random weights, which loading replaces. The state of MLX's generator would
    keep the graph of all these draws in memory until it is computed."""
    for _, leaf in tree_flatten(network):  # a module is a dict of its arrays and modules
        if isinstance(leaf, mx.array):
            mx.eval(leaf)
            mx.clear_cache()
    mx.eval(mx.random.state)
    wire()


def quantize(
    network: nn.Module,
    bits: int,
    group_size: int,
    choose: Callable[[str, nn.Module], Any] = lambda path, module: True,
) -> None:
    """Quantize every matrix whose rows divide into groups, without computing anything yet. `choose`
    returns for a module's path whether to quantize it, or its quantization as a dict. Raises
    OptionError if no matrix can be quantized."""

    def suits(path: str, module: nn.Module) -> Any:
        able = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        return able and choose(path, module)

    try:
        nn.quantize(network, group_size, bits, class_predicate=suits)
    except ValueError as problem:
        raise OptionError(f"cannot quantize to {bits} bits: {first_line(problem)}") from problem
    if not is_quantized(network):
        raise OptionError(f"no layer's width is a multiple of {group_size}: take a smaller group")


def expand(network: nn.Module) -> None:
    """Replace quantized layers by dequantized ones."""
    plain = [(path, expanded(module)) for path, module in network.named_modules()]
    network.update_modules(tree_unflatten([(path, new) for path, new in plain if new is not None]))


def expanded(module: nn.Module) -> nn.Module | None:
    """Return a dequantized layer, or None for a module that is not quantized. Weights are computed
    in pieces: for 3, 5 or 6 bits, MLX takes 4 to 7 times the bytes of the result on a CPU."""
    if isinstance(module, nn.QuantizedEmbedding):
        plain: Any = nn.Embedding(1, 1)
    elif isinstance(module, nn.QuantizedLinear):
        plain = nn.Linear(1, 1, bias=False)
    elif type(module).__name__ == "QuantizedSwitchLinear":
        from mlx_lm.models.switch_layers import SwitchLinear

        plain = SwitchLinear(1, 1, 1, bias=False)
    else:
        return None
    how = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    named = (module.weight, module.scales, module.get("biases"))
    parts = [part for part in named if part is not None]
    rows, pieces = module.weight.shape[0], []
    size = -(-rows * EXPANDED_AT_ONCE // module.weight.nbytes)
    for begin in range(0, rows, size):
        pieces.append(mx.dequantize(*(part[begin : begin + size] for part in parts), **how))
        mx.eval(pieces[-1])
    plain.weight = mx.concatenate(pieces)
    if "bias" in module:
        plain.bias = module.bias
    return plain


def twin_of(part: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a tree of modules that shares the arrays. Replacing an array or a module of
    one tree does not change the other. copies: The copies of the modules so far, by id."""
    if id(part) in copies:
        return copies[id(part)]
    if isinstance(part, nn.Module):
        twin = copies[id(part)] = copy.copy(part)
        for name, value in part.items():
            twin[name] = twin_of(value, copies)
        return twin
    if isinstance(part, list):
        return [twin_of(value, copies) for value in part]
    if isinstance(part, dict):
        return {name: twin_of(value, copies) for name, value in part.items()}
    return part


def dequantized(network: nn.Module) -> nn.Module:
    """Return a copy of a network without quantized layers, whose floating arrays are float32."""
    twin: nn.Module = twin_of(network, {})
    twin.set_dtype(mx.float32)  # exact values need scales in float32
    expand(twin)
    twin.set_dtype(mx.float32)
    mx.eval(twin.parameters())
    return twin
