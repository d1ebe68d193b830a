"""Which numbers a model is computed in: what may be asked for, and what is taken otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..checkpoints.quantization import DTYPES, check_affine
from ..errors import OptionError

EXPANDED_BELOW = 1 << 30
"""Bytes in float32 up to which quantized weights are expanded on the CPU. MLX's quantized kernels
for CPUs cost as much per row as one pass over all weights, so several rows at once gain nothing."""


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def expands(weights: int) -> bool:
    """Whether a quantized model of so many weights is computed in float32 instead."""
    return on_cpu() and weights * mx.float32.size < EXPANDED_BELOW


@dataclass(frozen=True)
class NumberFormat:
    """What is asked for. dtype: "auto" is float32 on the CPU, where half precision is slower and
    quantized weights of moderate size are expanded, and as stored elsewhere. q_bits: quantize on
    load, in groups of q_group_size. Raises OptionError for what MLX does not have."""

    dtype: str = "auto"
    q_bits: int | None = None
    q_group_size: int = 64

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise OptionError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.q_bits is not None:
            check_affine(self.q_bits, self.q_group_size)

    def floating(self, stored: mx.Dtype, *, quantized: bool) -> mx.Dtype:
        """The type of all weights that are stored as `stored`; quantized: and some of them are."""
        if self.dtype != "auto":
            return getattr(mx, self.dtype)
        return mx.float32 if on_cpu() and not quantized else stored

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
