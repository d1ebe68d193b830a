"""Files of checkpoints: where they come from, how they are read, renamed and written."""
