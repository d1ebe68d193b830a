"""Speculative decoding on Apple's MLX: the target model's own text, faster.

    from mlx_specdec import Options, generate, load

    pair = load("weights/py-llama", "weights/py-llama-draft")
    print(generate(pair, "def add(a, b):", Options(max_tokens=64)).text)

`help(mlx_specdec.generate)` and the help of the other names describe the library. Nothing heavy is
imported before one of these names is used. A faster BLAS, if there is one, is loaded before MLX if
this package is imported before MLX."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .conversion.convert import convert as convert
    from .core.options import Options as Options
    from .core.row import Request as Request
    from .engine.generate import generate as generate
    from .engine.generate import generate_many as generate_many
    from .engine.generate import stream_generate as stream_generate
    from .engine.generate import stream_many as stream_many
    from .engine.loading import load as load
    from .engine.prompt_cache import PromptCache as PromptCache
    from .errors import CheckpointError as CheckpointError
    from .errors import DecodingError as DecodingError
    from .errors import DocumentError as DocumentError
    from .errors import OptionError as OptionError
    from .errors import OutputError as OutputError
    from .errors import PromptError as PromptError
    from .errors import RewindError as RewindError
    from .errors import SourceError as SourceError
    from .errors import SpecdecError as SpecdecError
    from .errors import VocabularyError as VocabularyError
    from .models.cache_settings import CacheSettings as CacheSettings
    from .results import Result as Result
    from .results import Statistics as Statistics
    from .results import Step as Step
    from .text.thoughts import Thoughts as Thoughts
    from .types import Proposal as Proposal
    from .types import Proposer as Proposer

_HOMES = {
    name: home
    for home, names in {
        "conversion.convert": "convert",
        "core.options": "Options",
        "core.row": "Request",
        "engine.generate": "generate generate_many stream_generate stream_many",
        "engine.loading": "load",
        "engine.prompt_cache": "PromptCache",
        "errors": "CheckpointError DecodingError DocumentError OptionError OutputError "
        "PromptError RewindError SourceError SpecdecError VocabularyError",
        "models.cache_settings": "CacheSettings",
        "results": "Result Statistics Step",
        "text.thoughts": "Thoughts",
        "types": "Proposal Proposer",
    }.items()
    for name in names.split()
}

__all__ = list(_HOMES)

# Unless this variable is 0, Apple's M5 and CUDA multiply several rows of float32 in TF32, and a
# single row exactly. A pass over draft tokens would give other logits than single tokens do. MLX
# reads the variable at its first product. Every module of this package is imported after this
# line.
os.environ.setdefault("MLX_ENABLE_TF32", "0")


class _LoadsBlas:
    """A finder of modules that loads a faster BLAS just before MLX is first imported. Programs that
    never use MLX do not pay for it: loading it takes 30 ms and more."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Find no module. Raises OptionError as `system.load_blas` does."""
        if name == "mlx.core":
            import_module(".system", __name__).load_blas()
            sys.meta_path.remove(_LoadsBlas)


if sys.platform == "linux":  # elsewhere, MLX itself uses a fast BLAS
    sys.meta_path.insert(0, _LoadsBlas)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if instead := import_module(".system", __name__).hints("names").get(name):
        # The text of an AttributeError would be lost in `from mlx_specdec import name`.
        raise ImportError(f"{__name__}.{name} was removed in release 0.4: {instead}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
