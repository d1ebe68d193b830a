"""Generate text: `python main.py "prompt"`, the same program as `mlx-specdec generate`."""

from mlx_specdec.cli.app import generate, run_one

if __name__ == "__main__":
    run_one(generate)
