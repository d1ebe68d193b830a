"""The package as it decides on a machine whose default device is no CPU."""

import sys

import pytest


def off_cpu(patch: pytest.MonkeyPatch) -> None:
    """Have every module of the package find that it does not run on a CPU."""
    import mlx_specdec.models.loading  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_specdec.") and hasattr(module, "on_cpu"):
            patch.setattr(module, "on_cpu", lambda: False)
