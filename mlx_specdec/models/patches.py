"""Every change to the classes, functions and modules of others: what is replaced, why, and how to
undo it. A test refuses such changes in other modules. The new functions are in the modules that
apply a patch. Nothing here imports mlx-lm, for which T5 would wait."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import mlx.nn as nn

_CHANGES = "_changes_of_mlx_specdec"
"""The attribute in which an owner remembers what was replaced, so that both are freed together."""
_TOKENIZERS = "mlx_lm.tokenizer_utils"


@dataclass(frozen=True)
class Patch:
    """A change, which is applied and undone.

    Attributes:
        replaces: The names that are replaced, and their owners.
        why: The reason."""

    replaces: str
    why: str


class _Change(NamedTuple):
    patch: Patch
    name: str
    original: Any


class Replacement(Patch):
    """Other attributes of an owner, which is a module of Python or of MLX."""

    def apply(self, owner: Any, name: str, new: Any) -> None:
        """Replace an attribute, which exists. Nothing happens if it is `new` already."""
        original = getattr(owner, name)
        if original is not new:
            # A copy of the owner gets this tuple as well, and must not share what is added later.
            changes = (*vars(owner).get(_CHANGES, ()), _Change(self, name, original))
            vars(owner)[_CHANGES] = changes
            setattr(owner, name, new)

    def extend(self, modules: Iterable[nn.Module], **methods: Callable[..., Any]) -> None:
        """Give modules of MLX a subclass of their class, so that their parameters and names stay.
        Modules of one class stay of one class.

        Args:
            modules: The modules.
            methods: By name. Each is called with the method that it replaces, or None if there is
                none, then with the module, then with the arguments of the call.
        """
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
        return any(change.patch == self for change in vars(owner).get(_CHANGES, ()))

    def undo(self, owner: Any) -> None:
        """Restore an owner as it was before this patch, and so without later patches of it."""
        while self.applied(owner):
            *earlier, change = vars(owner)[_CHANGES]
            vars(owner)[_CHANGES] = tuple(earlier)
            setattr(owner, change.name, change.original)


def _around(method: Callable[..., Any], plain: Any) -> Any:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return method(plain, module, *args, **kwargs)

    return call


class FastStart(Patch):
    """mlx-lm's models and loader, imported without all the rest of it."""

    def apply(self) -> None:
        """Import mlx_lm.utils, unless mlx-lm was imported before. The package runs its `__init__`
        as soon as a name of it is read, and calls of its tokenizers import those."""
        spec = importlib.util.find_spec("mlx_lm")
        if spec is None or "mlx_lm" in sys.modules:
            return
        package, tokenizers = importlib.util.module_from_spec(spec), ModuleType(_TOKENIZERS)

        def whole(name: str) -> Any:
            self.undo()
            return getattr(package, name)

        vars(package)["__getattr__"] = whole
        vars(tokenizers)["__getattr__"] = partial(partial, _of_tokenizers)
        sys.modules |= {"mlx_lm": package, _TOKENIZERS: tokenizers}
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as that `__init__` sets it
        try:
            importlib.import_module("mlx_lm.utils")
        finally:
            del sys.modules[_TOKENIZERS]

    def undo(self) -> None:
        """Run what was put off, and let mlx_lm.utils have mlx-lm's own tokenizers."""
        package = importlib.import_module("mlx_lm")
        if vars(package).pop("__getattr__", None) is None:
            return
        importlib.reload(package)
        tokenizers, utils = (importlib.import_module(n) for n in (_TOKENIZERS, "mlx_lm.utils"))
        for name, value in list(vars(utils).items()):
            if isinstance(value, partial) and value.func is _of_tokenizers:
                setattr(utils, name, getattr(tokenizers, *value.args))


def _of_tokenizers(name: str, *args: Any, **rest: Any) -> Any:
    return getattr(importlib.import_module(_TOKENIZERS), name)(*args, **rest)


FAST_START = FastStart(
    "the modules mlx_lm, whose __init__ runs later, and for mlx_lm.utils mlx_lm.tokenizer_utils",
    "Both import transformers: to import mlx_lm.utils takes 1.4 seconds of a server's CPU with it, "
    "and 0.4 without.",
)
ATTENTION = Replacement(
    "scaled_dot_product_attention in the modules of mlx-lm that a network's classes are from",
    "Passes of a few rows are absorbed into a latent, or divided for Metal's vector kernel.",
)
QUANTIZED_ATTENTION = Replacement(
    "mlx_lm.models.base.quantized_scaled_dot_product_attention",
    "The scores of all rows at once would take more memory than a quantized cache saves.",
)
LIGHT_LAYERS = Replacement(
    "the classes of networks' nn.RoPE and nn.Linear, on a CPU",
    "The same bits take fewer operations, for which small models wait.",
)
LATENT = Replacement(
    "__call__ of the modules that expand the latent of mlx-lm's MLA",
    "Attention has to know the latent that its keys and values were made of.",
)
TAPS = Replacement(
    "__call__ of layers, and of other modules whose input or output is read",
    "mlx-lm's models do not show their hidden states, which drafters read.",
)
LEFT_OUT = Replacement(
    "__call__ and make_cache of mlx-lm's models that draft with some of their layers, and __call__ "
    "of the others",
    "The layers stay in their places, by which models know their kinds, and compute nothing.",
)
WATCHED = Replacement(
    "__call__ of the layers of such a model, for one pass",
    "Only a call of the model shows which cache a layer is given, and how much it returns.",
)
CAUGHT_WEIGHTS = Replacement(
    "sanitize and load_weights of a model of mlx-lm while its loader runs",
    "Our tensors are given to the loader, and are checked before they are loaded.",
)
PATCHES = (
    *(FAST_START, ATTENTION, QUANTIZED_ATTENTION, LIGHT_LAYERS),
    *(LATENT, TAPS, LEFT_OUT, WATCHED, CAUGHT_WEIGHTS),
)
