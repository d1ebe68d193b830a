"""Wrappers around mlx-lm's decoder-only models."""

from ..patches import import_without_tokenizers

import_without_tokenizers()
