"""`python -m mlx_specdec` is `mlx-specdec`."""

from .cli.start import main

main()
