"""`python -m mlx_specdec` is `mlx-specdec`."""

from .cli.app import main

main()
