"""All changes to classes, functions and modules of other packages: what is replaced, why, and how
to undo it. A test refuses such changes in other modules. The replacements themselves are in the
modules that apply a patch. This module does not import mlx-lm, because T5 does not need it."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import mlx.nn as nn

from ..system import open_files_kept

_CHANGES = "_changes_of_mlx_specdec"
"""Name of an owner's attribute that stores what was replaced, so that both are freed together."""
_TOKENIZERS = "mlx_lm.tokenizer_utils"


@dataclass(frozen=True)
class Patch:
    """A replacement of attributes of owners, which can be undone. An owner is a Python module or an
    MLX module. Each patch below is explained by what the patch replaces, and why."""

    name: str

    def apply(self, owner: Any, name: str, new: Any) -> None:
        """Replace an existing attribute of an owner, unless it is `new` already."""
        original = getattr(owner, name)
        if original is not new:
            # Store a new tuple: a copy of the owner refers to the old one.
            changes = (*vars(owner).get(_CHANGES, ()), (self, name, original))
            _remember(owner, changes)
            setattr(owner, name, new)

    def wrap(self, owner: Any, **functions: Callable[..., Any]) -> None:
        """Replace functions of an owner, once. A new function is called with the function that it
        replaces, and the arguments of the call."""
        if not self.applied(owner):
            for name, new in functions.items():
                self.apply(owner, name, _around(new, getattr(owner, name)))

    def extend(self, modules: Iterable[nn.Module], **methods: Callable[..., Any]) -> None:
        """Override methods of MLX modules by changing the class of each module to a subclass.
        Parameters and names stay the same. Modules of one class stay of one class. A new method is
        called with the method that it replaces (None if there is none), the module, and the
        arguments of the call."""
        classes: dict[type, type] = {}
        for module in modules:
            plain = type(module)
            if plain not in classes:
                body = {
                    name: _around(new, getattr(plain, name, None)) for name, new in methods.items()
                }
                body["__module__"] = plain.__module__
                classes[plain] = type(plain.__name__, (plain,), body)
            self.apply(module, "__class__", classes[plain])

    def applied(self, owner: Any) -> bool:
        """Return whether this patch has replaced something in an owner."""
        return any(patch == self for patch, *_ in vars(owner).get(_CHANGES, ()))

    def undo(self, owner: Any) -> None:
        """Undo this patch of an owner, and all patches of the owner that were applied later."""
        while self.applied(owner):
            *earlier, (_, name, original) = vars(owner)[_CHANGES]
            _remember(owner, tuple(earlier))
            setattr(owner, name, original)


def _remember(owner: Any, changes: tuple[tuple[Patch, str, Any], ...]) -> None:
    if isinstance(owner, type):
        setattr(owner, _CHANGES, changes)
    else:  # an MLX module would take an attribute for parameters
        vars(owner)[_CHANGES] = changes


def _around(method: Callable[..., Any], plain: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(plain, *args, **kwargs)

    return call


def import_without_tokenizers() -> None:
    """Import mlx_lm.utils, unless mlx-lm was imported before. The `__init__` of mlx_lm runs when
    one of its names is first read, and its tokenizers are imported when they are first called. Both
    import transformers. On a server's CPU, mlx_lm.utils takes 1.4 seconds to import with
    transformers, and 0.4 seconds without it."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or "mlx_lm" in sys.modules:
        return
    package, tokenizers = importlib.util.module_from_spec(spec), ModuleType(_TOKENIZERS)

    def complete(name: str) -> Any:
        if vars(package).pop("__getattr__", None) is not None:
            importlib.reload(package)  # runs its `__init__`
        return getattr(package, name)

    vars(package)["__getattr__"] = complete
    vars(tokenizers)["__getattr__"] = partial(partial, _call_tokenizers)
    sys.modules |= {"mlx_lm": package, _TOKENIZERS: tokenizers}
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # mlx-lm's `__init__` sets it, too
    try:
        with open_files_kept():
            importlib.import_module("mlx_lm.utils")
    finally:
        del sys.modules[_TOKENIZERS]


def _call_tokenizers(name: str, *args: Any, **rest: Any) -> Any:
    """Import mlx-lm's module of tokenizers, and call its function or class `name`."""
    return getattr(importlib.import_module(_TOKENIZERS), name)(*args, **rest)


ATTENTION = Patch("attention")
"""Replaces scaled_dot_product_attention in the modules of mlx-lm that define a network's classes.
Passes of a few rows are absorbed into a latent, or divided for Metal's vector kernel."""
QUANTIZED_ATTENTION = Patch("quantized_attention")
"""Replaces mlx_lm.models.base.quantized_scaled_dot_product_attention. The scores of all rows at
once would take more memory than a quantized cache saves."""
LIGHT_LAYERS = Patch("light_layers")
"""Replaces the classes of nn.RoPE and nn.Linear modules in networks, on a CPU. The same results
take fewer operations, whose submission dominates the time of small models."""
LATENT = Patch("latent")
"""Replaces __call__ of the modules that expand the latent of mlx-lm's MLA. Attention needs the
latent from which its keys and values were expanded."""
HIDDEN_STATES = Patch("hidden_states")
"""Replaces __call__ of layers, and of other modules whose input or output is read. mlx-lm's models
do not return their hidden states, which drafters read."""
WATCHED = Patch("watched")
"""Replaces __call__ of layers, or of all modules, for one pass. Only a call of the model shows
which cache a module gets, and whether the module writes to the cache."""
RECORDED = Patch("recorded")
"""Replaces __call__ of the modules that write recurrent state, and of the projections inside of
them. After a rejection only the recurrence runs again, over rows that the pass has projected."""
PRODUCTS = Patch("products")
"""Replaces the operator @ of mlx.core.array, and matmul, addmm and quantized_matmul of mlx.core.
Kernels for one row add in another order than kernels for several rows. Products of few
rows are padded in passes with Options.exact."""
RECURRENCES = Patch("recurrences")
"""Replaces ssm_update, recurrent_gla and wkv7_kernel in the modules of mlx-lm that define a
network. They compute one row and several rows in different ways. They are called for each row in
passes with Options.exact."""
CAUGHT_WEIGHTS = Patch("caught_weights")
"""Replaces sanitize and load_weights of a model of mlx-lm while its loader runs. The loader gets
tensors that this package has read, which are checked before they are loaded."""
MENDED = Patch("mended")
"""Replaces attributes and methods of networks that compute something else than config.json says.
Each function of `mlx_lm.mends` explains one replacement."""
