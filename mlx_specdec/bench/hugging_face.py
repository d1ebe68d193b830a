"""torch and transformers, where they are installed, for the baseline that is made of them.

The only module that imports torch, and only when it is asked to. Knows threads and versions; knows
no pair and no method. Nothing here reaches a network: the Hub is switched off before the import.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import blas
from ..errors import first_line

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class NoBaselineError(Exception):
    """A baseline cannot run here. The message says why in one line; the user did nothing wrong."""


@dataclass(frozen=True)
class HuggingFace:
    """Both packages, imported. threads: of torch, while it works."""

    torch: Any
    transformers: Any
    threads: int

    @contextmanager
    def at_work(self, seed: int) -> Iterator[None]:
        """No gradients, this many threads, torch's own generator seeded.

        torch and MLX may share one BLAS: its number of threads is put back afterwards.
        """
        with blas.threads_kept(), self.torch.inference_mode():
            self.torch.set_num_threads(self.threads)
            self.torch.manual_seed(seed)
            yield

    def describe(self) -> str:
        """Versions, number format and threads, for the setting of a benchmark."""
        return (
            f"transformers {self.transformers.__version__} on torch {self.torch.__version__}: CPU, "
            f"float32, {self.threads} thread{'s' if self.threads > 1 else ''}"
        )


def hugging_face() -> HuggingFace:
    """Import both. Raises NoBaselineError where one is missing or does not load."""
    # Importing torch may count threads already.
    with blas.threads_kept():
        torch = _import("torch")
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
        transformers = _import("transformers")
    transformers.utils.logging.set_verbosity_error()
    return HuggingFace(torch, transformers, threads())


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise NoBaselineError(f"{name} is not installed") from None
    except (ImportError, OSError, RuntimeError) as problem:
        raise NoBaselineError(f"{name} does not load: {first_line(problem)}") from problem


def threads() -> int:
    """OMP_NUM_THREADS, or the cores that this process may use.

    What torch would take by itself is no measure: it follows the BLAS that was loaded for MLX.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isascii() and asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
