"""A target that is divided between several machines. Rank 0 sends orders to the other ranks."""
