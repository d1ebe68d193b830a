"""Wrappers around mlx-lm's decoder-only models."""

from ..patches import FAST_START

FAST_START.apply()
