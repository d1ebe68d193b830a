"""mlx-lm's decoder-only models, which are wrapped."""

from ..patches import FAST_START

FAST_START.apply()
