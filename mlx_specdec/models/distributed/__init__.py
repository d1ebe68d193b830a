"""A target that is divided between several machines: rank 0 decides, the others follow."""
