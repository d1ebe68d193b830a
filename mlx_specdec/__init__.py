"""mlx-specdec: speculative decoding on Apple's MLX."""

__version__ = "0.1.0"
