"""Models behind the Context interface: T5 in our own arithmetic, decoder-only through mlx-lm."""
