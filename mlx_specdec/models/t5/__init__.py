"""T5 and its kin, in our own arithmetic."""
