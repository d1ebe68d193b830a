"""Models that implement the `interfaces.Model` protocol. Encoder-decoder models and drafters are
computed here; mlx-lm computes decoder-only models."""
