"""Generate text: `python main.py "prompt"`, the same program as `mlx-specdec generate`."""

from mlx_specdec.cli.start import main

if __name__ == "__main__":
    main("generate")
