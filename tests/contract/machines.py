"""Another machine, as MLX and Python describe it, and a cache of the Hub with chosen models."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

Pretend = Callable[..., None]


def pretender(patch: pytest.MonkeyPatch) -> Pretend:
    """Return a function that says what this machine is. Nothing can be computed afterwards."""

    def pretend(
        nbytes: int, *, cpu: bool = False, mac: int | None = None, chip: str = "Apple M4 Pro"
    ) -> None:
        """nbytes: What models may take. cpu: Whether there is no accelerator. mac: The memory of a
        Mac, or None for another machine."""
        described: dict[str, int | str] = {
            "max_recommended_working_set_size": nbytes,
            "memory_size": mac or nbytes,
            "architecture": "applegpu_g16s",
            "device_name": chip,
        }
        device = mx.Device(mx.cpu if cpu else mx.gpu)
        patch.setattr(mx.metal, "is_available", lambda: mac is not None)
        patch.setattr(mx, "device_info", lambda device=None: described)
        patch.setattr(mx, "default_device", lambda: device)

    return pretend


def put(cache: Path, name: str, files: dict[str, bytes], commit: str = "c0ffee") -> None:
    """Write a repository to a cache as huggingface_hub does, with links to its blobs."""
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    for directory in (snapshot, place / "blobs", place / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    for file, content in files.items():
        blob = place / "blobs" / f"{commit}-{file}"
        blob.write_bytes(content)
        (snapshot / file).symlink_to(blob)
