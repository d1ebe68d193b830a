"""Another device for the tests. Python runs this file at its start if PYTHONPATH names its folder.

tests/conftest.py puts the folder there, for the tests and for all processes that they start, if one
of these variables is set:

    MLX_SPECDEC_TEST_DEVICE=cpu   MLX computes on the CPU of a machine that has a GPU.
    MLX_SPECDEC_TEST_AS_GPU=1     The package takes no branch for CPUs, though MLX computes on one.

Both change a module right after its import, so that nothing is imported earlier than without them.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Change = Callable[[ModuleType], None]


def compute_on_the_cpu(core: ModuleType) -> None:
    """Make the CPU the default device of mlx.core."""
    core.set_default_device(core.cpu)


def take_no_branch_for_cpus(number_format: ModuleType) -> None:
    """Let `on_cpu` say no, before other modules import it."""
    number_format.on_cpu = lambda: False


class Changing(MetaPathFinder):
    """Finds modules as usual, and changes some of them after their import."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute, change = spec.loader.exec_module, self._changes[name]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


changes: dict[str, Change] = {}
if os.environ.get("MLX_SPECDEC_TEST_DEVICE") == "cpu":
    changes["mlx.core"] = compute_on_the_cpu
if os.environ.get("MLX_SPECDEC_TEST_AS_GPU") == "1":
    changes["mlx_specdec.models.number_format"] = take_no_branch_for_cpus
if changes:
    sys.meta_path.insert(0, Changing(changes))
