"""Layers for multi-token prediction propose, as any network that reads hidden states does; most
targets bring them in their own checkpoint."""

from __future__ import annotations

from .hidden_state import drafter as drafter

MISSING = (
    "there is no such drafter to propose: the checkpoint carries no layers for multi-token "
    "prediction, which mlx-lm's conversions drop and mlx-specdec convert keeps, or another drafter "
    "was named with draft-model"
)
