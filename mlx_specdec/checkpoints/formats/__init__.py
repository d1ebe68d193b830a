"""File formats of checkpoints. Every reader is a `tensors.TensorReader`."""
