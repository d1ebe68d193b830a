"""Arguments that mean nothing."""

import mlx.core as mx

NO_DRAFT = mx.zeros((1, 0), dtype=mx.int32)
"""No draft tokens, of one sequence."""
