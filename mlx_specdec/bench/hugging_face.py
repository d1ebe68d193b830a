"""torch and transformers, where they are installed, and our networks as models of theirs.

The only module that imports torch, and only when it is asked to. Nothing here reaches a network:
the Hub is switched off before the import. Weights come from memory, as they are computed with here,
so that both sides have the very same ones.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from .. import blas
from ..errors import first_line
from ..models.self_draft import expanded
from ..models.t5 import T5

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

HEAD = "lm_head.weight"
_OURS = ("quantization", "quantization_config", "auto_map", "dtype", "torch_dtype")
"""Of config.json: what is said about weights that are not read from there, and code."""


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


def try_out(run: Callable[[], object]) -> None:
    """Find out before a long measurement. Raises NoBaselineError."""
    try:
        run()
    except Exception as problem:  # another program's, about models that it cannot run so
        raise NoBaselineError(f"it cannot generate: {first_line(problem)}") from problem


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
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def weights(network: nn.Module) -> dict[str, np.ndarray]:
    """Every weight under its name in the checkpoint, float32, quantized ones dequantized."""
    given = dict(tree_flatten(network.parameters()))
    for path, module in network.named_modules():
        if hasattr(module, "bits"):
            given = {name: a for name, a in given.items() if not name.startswith(f"{path}.")}
            whole = tree_flatten(expanded(module).parameters())
            given.update((f"{path}.{name}", array) for name, array in whole)
    return {name: np.array(array.astype(mx.float32)) for name, array in given.items()}


def settings(config: Mapping[str, Any], network: nn.Module) -> dict[str, Any]:
    """config.json as transformers is to read it.

    T5's scaling before the head: transformers takes it from tie_word_embeddings, mostly.
    """
    told = {name: value for name, value in config.items() if name not in _OURS}
    if isinstance(network, T5):
        told["tie_word_embeddings"] = network.config.scales_output
        told.pop("scale_decoder_outputs", None)
    return told


def build(hugging: HuggingFace, config: Mapping[str, Any], network: nn.Module) -> Any:
    """transformers' model, in float32 on the CPU, that computes what `network` does.

    config: the contents of config.json. Raises NoBaselineError where transformers does not have the
    model, or divides its weights into other tensors.
    """
    model = _empty(hugging, settings(config, network), isinstance(network, T5))
    given = {name: hugging.torch.from_numpy(array) for name, array in weights(network).items()}
    _check_names(model, given)
    model.load_state_dict(given, strict=False, assign=True)
    model.tie_weights()
    if HEAD in given:
        # transformers 5 ties every T5, whatever its configuration says.
        model.lm_head.weight = hugging.torch.nn.Parameter(given[HEAD], requires_grad=False)
    if isinstance(network, T5):
        # transformers 5 reads these off the configuration after the model was built, and wrongly.
        # Its caches have as many layers as the encoder, of which only the decoder writes into them.
        model.config.num_layers = network.config.num_decoder_layers
        if model.config.model_type == "umt5":
            model.config.tie_word_embeddings = network.config.scales_output
    model.generation_config = hugging.transformers.GenerationConfig()
    return model.eval()


def _empty(hugging: HuggingFace, told: dict[str, Any], has_encoder: bool) -> Any:
    transformers = hugging.transformers
    kind = "AutoModelForSeq2SeqLM" if has_encoder else "AutoModelForCausalLM"
    try:
        config = transformers.AutoConfig.for_model(**told)
        return getattr(transformers, kind).from_config(
            config, dtype=hugging.torch.float32, trust_remote_code=False
        )
    except Exception as problem:  # whatever another program finds wrong is no fault of the user's
        raise NoBaselineError(
            f"it does not build a model of type {told.get('model_type')}: {first_line(problem)}"
        ) from problem


def _check_names(model: Any, given: Mapping[str, Any]) -> None:
    """Raises NoBaselineError unless all parameters are given, those tied to others aside."""
    known = model.state_dict()
    strange = sorted(given.keys() - known.keys())
    # Parameters that are tied come once, under their first name.
    strange += sorted({name for name, _ in model.named_parameters()} - given.keys())
    strange += sorted(
        name for name in given.keys() & known.keys() if given[name].shape != known[name].shape
    )
    if strange:
        raise NoBaselineError(f"its model has other tensors than ours, {strange[0]} among them")
