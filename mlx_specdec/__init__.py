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
    from .conversion.report import ConversionReport as ConversionReport
    from .conversion.verify import TextChange as TextChange
    from .decoding.sequence import Emission as Emission
    from .decoding.sequence import Piece as Piece
    from .decoding.sequence import TokenLogprob as TokenLogprob
    from .decoding.statistics import Seconds as Seconds
    from .decoding.statistics import SourceFigures as SourceFigures
    from .decoding.statistics import Statistics as Statistics
    from .draft_length.length import DraftLength as DraftLength
    from .engine.generate import Run as Run
    from .engine.generate import generate as generate
    from .engine.generate import generate_many as generate_many
    from .engine.generate import stream_generate as stream_generate
    from .engine.generate import stream_many as stream_many
    from .engine.loading import load as load
    from .engine.pair import Pair as Pair
    from .engine.pair import with_documents as with_documents
    from .engine.pair import with_history as with_history
    from .engine.prompt_cache import PromptCache as PromptCache
    from .engine.request import Request as Request
    from .engine.results import Labels as Labels
    from .engine.results import Part as Part
    from .engine.results import Result as Result
    from .engine.scheduler import Scheduler as Scheduler
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
    from .interfaces import Noise as Noise
    from .interfaces import Proposal as Proposal
    from .interfaces import Proposer as Proposer
    from .interfaces import Rule as Rule
    from .interfaces import Scores as Scores
    from .interfaces import Verdict as Verdict
    from .models.cache_settings import CacheSettings as CacheSettings
    from .options import Options as Options
    from .text.thoughts import Thoughts as Thoughts

_HOMES = {
    "CacheSettings": "models.cache_settings",
    "CheckpointError": "errors",
    "DecodingError": "errors",
    "DocumentError": "errors",
    "DraftLength": "draft_length.length",
    "Emission": "decoding.sequence",
    "Labels": "engine.results",
    "Noise": "interfaces",
    "OptionError": "errors",
    "Options": "options",
    "OutputError": "errors",
    "Pair": "engine.pair",
    "Part": "engine.results",
    "Piece": "decoding.sequence",
    "PromptCache": "engine.prompt_cache",
    "PromptError": "errors",
    "Proposal": "interfaces",
    "Proposer": "interfaces",
    "ConversionReport": "conversion.report",
    "Request": "engine.request",
    "Result": "engine.results",
    "RewindError": "errors",
    "Rule": "interfaces",
    "Run": "engine.generate",
    "Scheduler": "engine.scheduler",
    "Scores": "interfaces",
    "Seconds": "decoding.statistics",
    "SourceError": "errors",
    "SourceFigures": "decoding.statistics",
    "SpecdecError": "errors",
    "Statistics": "decoding.statistics",
    "TextChange": "conversion.verify",
    "Thoughts": "text.thoughts",
    "TokenLogprob": "decoding.sequence",
    "Verdict": "interfaces",
    "VocabularyError": "errors",
    "convert": "conversion.convert",
    "generate": "engine.generate",
    "generate_many": "engine.generate",
    "load": "engine.loading",
    "stream_generate": "engine.generate",
    "stream_many": "engine.generate",
    "with_documents": "engine.pair",
    "with_history": "engine.pair",
}

__all__ = list(_HOMES)

_REMOVED: dict[str, str] = {}
"""A name that release 0.4 removed -> what to use instead. An entry stays for one release.
docs/upgrading.md has the same table."""

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
        """Find no module. Raises OptionError as `process.load` does."""
        if name == "mlx.core":
            import_module(".process", __name__).load()
            sys.meta_path.remove(_LoadsBlas)


if sys.platform == "linux":  # MLX brings a fast BLAS to other systems
    sys.meta_path.insert(0, _LoadsBlas)


def __getattr__(name: str) -> Any:
    if instead := _REMOVED.get(name):
        # The text of an AttributeError would be lost in `from mlx_specdec import name`.
        raise ImportError(f"{__name__}.{name} was removed in release 0.4: {instead}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
