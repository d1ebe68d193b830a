"""File formats of checkpoints, one room each; every reader has `infos`, `rows` and `contents`."""
