"""File formats of checkpoints, one room each; every reader satisfies `reader.Reader`."""
