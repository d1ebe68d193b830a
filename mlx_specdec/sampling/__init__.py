"""Sampling: logits to log-probabilities, random numbers, and grammar constraints."""
