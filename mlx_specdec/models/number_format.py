"""Which numbers a model is computed in when nobody says so. Knows the device, and no model."""

from __future__ import annotations

import mlx.core as mx

EXPANDED_BELOW = 1 << 30
"""Bytes in float32 up to which quantised weights are expanded on the CPU. MLX's quantised kernels
for CPUs cost as much per row as one pass over all weights, so several rows at once gain nothing."""


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def expands(weights: int) -> bool:
    """Whether a quantised model of so many weights is computed in float32 instead."""
    return on_cpu() and weights * mx.float32.size < EXPANDED_BELOW
