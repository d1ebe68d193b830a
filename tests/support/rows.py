"""Rows without a request, for tests of proposers and of what they read."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mlx_specdec.core.distribution import Distribution
from mlx_specdec.core.options import Options


def row_of(
    committed: Sequence[int], vocabulary: int, options: Options | None = None, **more: Any
) -> Any:
    """Return what proposers use of a `Row` with these committed tokens."""
    options = options or Options()
    fields = {
        "prompt": list(committed),
        "committed": list(committed),
        "options": options,
        "distribution": Distribution(options, vocabulary),
        "drafted_from": Distribution(options, vocabulary),
        "state": {},
        "seen": (),
        "processed": 0,
        "position": 0,
        "prediction": [],
        "request": SimpleNamespace(tenant=""),
    }
    return SimpleNamespace(**fields | more)
