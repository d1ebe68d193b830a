"""Convert a checkpoint: `python convert.py --model t5-small`, the same as `mlx-specdec convert`."""

from mlx_specdec.cli.app import convert, run_one

if __name__ == "__main__":
    run_one(convert)
