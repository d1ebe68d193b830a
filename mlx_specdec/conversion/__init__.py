"""Conversion of checkpoints to MLX's layout, with a report about every tensor."""
