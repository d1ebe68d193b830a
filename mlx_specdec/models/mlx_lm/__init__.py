"""Decoder-only models, by wrapping those of mlx-lm."""
