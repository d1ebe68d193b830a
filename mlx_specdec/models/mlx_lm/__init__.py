"""mlx-lm's decoder-only models, which are wrapped.

mlx-lm imports all of itself in its `__init__`, and transformers for its tokenizers, which costs a
command half of its first second. Its models and its loader are imported here without both."""

import importlib
import importlib.util
import os
import sys
import types
from functools import partial
from typing import Any

_TOKENIZERS = "mlx_lm.tokenizer_utils"


def _of_tokenizers(name: str, *args: Any, **rest: Any) -> Any:
    return getattr(importlib.import_module(_TOKENIZERS), name)(*args, **rest)


def _import_models() -> None:
    """Import mlx_lm.utils. The package runs its `__init__` as soon as a name of it is read, and
    calls of tokenizer_utils from there import that module."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.loader is None or "mlx_lm" in sys.modules:
        return
    package, loader = importlib.util.module_from_spec(spec), spec.loader

    def whole(name: str) -> Any:
        vars(package).pop("__getattr__", None)
        loader.exec_module(package)
        return getattr(package, name)

    tokenizers = types.ModuleType(_TOKENIZERS)
    vars(package)["__getattr__"] = whole
    vars(tokenizers)["__getattr__"] = partial(partial, _of_tokenizers)
    sys.modules |= {"mlx_lm": package, _TOKENIZERS: tokenizers}
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as that `__init__` sets it
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        del sys.modules[_TOKENIZERS]


_import_models()
