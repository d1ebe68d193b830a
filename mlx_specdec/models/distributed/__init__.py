"""A target that is divided between several machines. Rank 0 sends orders to the other ranks."""

STATUS = "MLX_SPECDEC_STATUS"
"""Environment variable with the file into which rank 0 writes its exit code, which mlx.launch does
not tell. `mlx-specdec launch` sets it."""
