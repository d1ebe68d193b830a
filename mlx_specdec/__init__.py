"""Speculative decoding on Apple's MLX: the target model's own text, faster.

    from mlx_specdec import Options, generate, load, stream_generate

Nothing heavy is imported before one of these names is used; a faster BLAS is loaded, where there is
one, before MLX itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .assemble import Pair as Pair
    from .assemble import generate as generate
    from .assemble import load as load
    from .assemble import stream_generate as stream_generate
    from .assemble import with_documents as with_documents
    from .cache_settings import CacheSettings as CacheSettings
    from .checkpoints.convert import convert as convert
    from .decoding.run import Result as Result
    from .decoding.run import Run as Run
    from .decoding.stop_criteria import Emission as Emission
    from .errors import SpecdecError as SpecdecError
    from .many import Request as Request
    from .many import generate_many as generate_many
    from .many import stream_many as stream_many
    from .options import Options as Options

_HOMES = {
    "CacheSettings": "cache_settings",
    "Emission": "decoding.stop_criteria",
    "Options": "options",
    "Pair": "assemble",
    "Request": "many",
    "Result": "decoding.run",
    "Run": "decoding.run",
    "SpecdecError": "errors",
    "convert": "checkpoints.convert",
    "generate": "assemble",
    "generate_many": "many",
    "load": "assemble",
    "stream_generate": "assemble",
    "stream_many": "many",
    "with_documents": "assemble",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home not in ("cache_settings", "errors", "options"):
        import_module(".blas", __name__).load()
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
