"""Convert a checkpoint: `python convert.py --model t5-small`, the same as `mlx-specdec convert`."""

from mlx_specdec.cli.start import main

if __name__ == "__main__":
    main("convert")
