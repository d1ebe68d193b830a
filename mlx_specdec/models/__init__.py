"""Models that implement the `types.Model` protocol. Encoder-decoder models and drafters are
computed here; mlx-lm computes decoder-only models."""
