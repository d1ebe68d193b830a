"""A tiny configuration of every family that mlx-lm has."""

import importlib
import inspect
from typing import Any

from . import tiny

SMALL: dict[str, Any] = tiny.complete(tiny.DATA["small"])
"""Sizes under the names of all families. Published factors would drown a tiny model's logits."""
OWN: dict[str, dict[str, Any]] = {
    **{config["model_type"]: config for config in tiny.CONFIGS.values()},
    **tiny.complete(tiny.DATA["own"]),
}
"""Entries of a family besides SMALL. The ids that phi3small masks are written down in mlx-lm."""
NOT_TINY = {
    "bitnet": "its layers are Metal kernels",
    "muse_spark": "its attention is a Metal kernel",
    "olmo": "it is made by a package of its own, ai2-olmo",
    "prism_hadamard_qwen35": "its weights are packed in blocks of 512 at least",
}
DIFFERENT = {
    "phi3small": "mlx-lm adds a mask of True and False to the scores of its passes of several rows",
}
"""Decoded plainly, with a warning."""
ONE_AT_A_TIME = {
    **dict.fromkeys(("afm7", "gpt_bigcode", "phi3small"), "one position or mask for all sequences"),
    **dict.fromkeys(("deepseek_v41", "llama4"), "caches of their own"),
    "longcat_flash_ngram": "the state of short sequences is shorter",
    "recurrent_gemma": "the first token is normalized in another way",
}
"""Families that decode one sequence at a time, and why."""


def config_of(name: str) -> dict[str, Any]:
    arguments = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    parameters = inspect.signature(arguments).parameters
    changes = {"model_type": name, **OWN.get(name, {})}
    if "text_config" in parameters:
        changes["text_config"] = {**SMALL, "model_type": name, **changes.get("text_config", {})}
    # mlx-lm inspects the signature again for each key of a config.
    small = {key: value for key, value in SMALL.items() if key in parameters}
    return {**small, **changes}
