"""File formats of checkpoints, one room each; every reader is a `reader.Reader`."""
