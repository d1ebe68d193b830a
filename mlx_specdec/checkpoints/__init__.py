"""Files of checkpoints: download, formats, names of tensors, and writing."""
