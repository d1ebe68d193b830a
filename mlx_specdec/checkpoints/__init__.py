"""Files of checkpoints: where they come from, how they are read, renamed and written.

Knows files and tensors by name. Knows nothing of any model's arithmetic.
"""
