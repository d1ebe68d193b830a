"""Drafters that are known by their files and not run here, so that a message can name them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .. import mtp_layers
from .settings import nested

_TYPES = {
    "mlp_speculator": "an MLPSpeculator",
    "recurrent_drafter": "a ReDrafter",
}
_KEYS = {
    "medusa_num_heads": "Medusa heads, which are given as the model and bring their base model",
    "hydra_num_heads": "Hydra heads",
    "exit_dim": "a ReDrafter",
    "n_predict": "an MLPSpeculator",
}
_TENSORS = {
    "speculator.emb.0.weight": "an MLPSpeculator",
    "rnn_u.weight": "a ReDrafter",
    "drafter.rnn_u.weight": "a ReDrafter",
}


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """What these files hold, with its article; None where they are no drafter that is known."""
    said = nested(config)
    if said.get("projector_type") == "domino":
        return "a Domino"
    told = config.get("speculators_model_type")
    if isinstance(told, str):
        return f"a drafter that says it is {told!a:.40}"
    if what := _TYPES.get(str(config.get("model_type"))):
        return what
    if what := next((_KEYS[key] for key in _KEYS if key in said), None):
        return what
    if what := next((_TENSORS[name] for name in _TENSORS if name in names), None):
        return what
    if names and all(map(mtp_layers.looks_so, names)):
        return "layers for multi-token prediction of another family"
    return None
