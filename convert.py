"""Convert a checkpoint: `python convert.py --model t5-small`, the same as `mlx-specdec convert`."""

try:
    from mlx_specdec.cli.start import main
except KeyboardInterrupt:  # Nothing has begun.
    raise SystemExit(130) from None

if __name__ == "__main__":
    main("convert")
