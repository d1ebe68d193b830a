"""Generate text: `python main.py "prompt"`, the same program as `mlx-specdec generate`."""

try:
    from mlx_specdec.cli.start import main
except KeyboardInterrupt:  # Nothing has begun.
    raise SystemExit(130) from None

if __name__ == "__main__":
    main("generate")
