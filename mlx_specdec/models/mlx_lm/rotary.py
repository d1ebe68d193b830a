"""Translation of the rotary settings in config.json to the keys that mlx-lm's families read.

transformers 5 writes `rope_parameters`: one entry, or one for each type of layer. Earlier versions
wrote `rope_theta`, `rope_scaling` and other keys. Most of mlx-lm's families read only one of the
two spellings, and use default values if config.json has the other one."""

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import signature
from typing import Any

import mlx.nn as nn

from ...checkpoints.files import text_config
from ...errors import CheckpointError
from ..foreign import with_parts

NEW = "rope_parameters"
GLOBAL = ("full_attention", "main")
"""The entries of `rope_parameters` for layers with full attention. They replace `rope_theta`."""
SECOND = {
    "sliding_attention": ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta"),
    "compress": ("compress_rope_theta",),
}
"""Other entries of `rope_parameters`, and the older keys for the rotary base of such layers."""
SAME_BASE = ("olmo3",)
"""Families whose types of layers have one rotary base, but different scaling of positions."""
UNSCALED = ("default", "mrope")
"""Types of rotary positions that do not scale the positions of text."""
CLASSES = {
    "llama3": "Llama3",
    "yarn": "Yarn",
    "deepseek_yarn": "Yarn",
    "telechat3-yarn": "Yarn",
    "longrope": "SuScaled",
    "su": "SuScaled",
    "dynamic": "Dynamic",
    "proportional": "Proportional",
}
"""The types of scaling, and a part of the names of the classes that implement them in mlx-lm."""


def kind_of(settings: Mapping[str, Any]) -> str:
    """Return the type in `rope_scaling`, or in `rope_parameters` or an entry of it."""
    return str(settings.get("rope_type") or settings.get("type") or "default")


def rotated_share(part: Mapping[str, Any]) -> float | None:
    """Return the share of a head's width that is rotated, if config.json states one."""
    settings = part.get(NEW) or {}
    return part.get("partial_rotary_factor") or settings.get("partial_rotary_factor")


def scaling(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings that scale positions, in either spelling, or None if there are none. If
    types of layers differ, return the settings of a type that scales positions. part: The contents
    of config.json, or its `text_config`."""
    old = part.get("rope_scaling")
    entries = [old] if isinstance(old, Mapping) and old else _entries(part).values()
    return next((entry for entry in entries if kind_of(entry) not in UNSCALED), None)


def spelled(config: Mapping[str, Any], names: set[str], *, both: bool) -> dict[str, Any]:
    """Return config.json, and its `text_config`, with the older keys that the family reads. As in
    transformers, `rope_parameters` overrule older keys unless there is `rope_scaling`.

    Args:
        names: The keys that the family reads; see `names_of`.
        both: Add `rope_parameters` for families that read only these.
    Raises:
        CheckpointError: If types of layers differ in a way that the family does not implement."""

    def change(part: Mapping[str, Any]) -> dict[str, Any]:
        old = {**part, **_old_keys(part, names)}
        return {**old, **_new_keys(old, names)} if both else old

    return with_parts(config, change)


def check(network: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a network does not scale positions as config.json says. Many
    families ignore types that they do not implement."""
    settings = scaling(text_config(config))
    if settings is None or settings.get("factor") == 1:
        return
    kind = kind_of(settings)
    modules = ((type(module).__name__, module) for module in network.modules())
    ropes = {(n, getattr(m, "scale", 1.0)) for n, m in modules if "RoPE" in n or "Rotary" in n}
    computed = {name for name, part in CLASSES.items() for rope, _ in ropes if part in rope}
    if any(scale != 1.0 for _, scale in ropes):
        computed.add("linear")
    if kind not in computed:
        raise CheckpointError(
            f"config.json scales positions by the type {kind!a:.40}, which mlx-lm ignores for "
            f"{config.get('model_type')}: update mlx-lm, or take the type out of config.json"
        )


def names_of(arguments: type) -> set[str]:
    """Return the names of all keys of config.json that a family and its text model read."""
    here = vars(sys.modules[arguments.__module__]).values()
    modules = {getattr(value, "__module__", getattr(value, "__name__", "")) for value in here}
    return {
        name
        for module in {*modules, arguments.__module__}
        if str(module).startswith("mlx_lm.models.")
        for value in vars(sys.modules[module]).values()
        if isinstance(value, type) and is_dataclass(value)
        for name in signature(value).parameters
    }


def _entries(part: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the entries of `rope_parameters` by type of layer, full attention first. The name of
    an entry for all types is ""."""
    settings = part.get(NEW)
    if not isinstance(settings, Mapping) or not settings:
        return {}
    nested = {name: entry for name, entry in settings.items() if isinstance(entry, Mapping)}
    first = {name: nested[name] for name in GLOBAL if name in nested}
    return {**first, **nested} or {"": settings}


def _old_keys(part: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the older keys, as far as they are in `names`, for the `rope_parameters` of a part."""
    entries = _entries(part)
    if not entries:
        return {}
    main = next(iter(entries.values()))
    _check_types_of_layers(part, entries, names)
    settings = scaling({NEW: part[NEW]})
    base, head = main.get("rope_theta"), part.get("head_dim")
    share: Any = main.get("partial_rotary_factor")
    has_width = isinstance(share, int | float) and isinstance(head, int)
    old = {
        "rope_theta": base,
        "rotary_emb_base": base,
        "partial_rotary_factor": share,
        "rotary_pct": share,
        "rotary_dim": int(share * head) if has_width else None,
    }
    for kind, bases in SECOND.items():
        old |= dict.fromkeys(bases, entries.get(kind, {}).get("rope_theta"))
    if settings is not None:
        kind = kind_of(settings)
        old["rope_scaling"] = {**settings, "rope_type": kind, "type": kind}
        old["original_max_position_embeddings"] = settings.get("original_max_position_embeddings")
    if "partial_rotary_factors" in names and "" not in entries:
        layers = [entries.get(kind, main) for kind in part.get("layer_types") or ()]
        old["rope_theta"] = [layer.get("rope_theta") for layer in layers]
        old["partial_rotary_factors"] = [layer.get("partial_rotary_factor", 1) for layer in layers]
    old = {name: value for name, value in old.items() if name in names and value is not None}
    if "rope_scaling" in names:
        old.setdefault("rope_scaling", None)
    return {**old, **part} if part.get("rope_scaling") else old


def _check_types_of_layers(
    part: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]], names: set[str]
) -> None:
    """Raise CheckpointError if types of layers differ and the family reads no keys for that."""
    second = {name for kind in entries for name in SECOND.get(kind, ())} & names
    if second or "partial_rotary_factors" in names or (NEW in names and "rope_theta" not in names):
        return
    keys = ("rope_theta",) if part.get("model_type") in SAME_BASE else ("rope_theta", "factor")
    if len({tuple(map(entry.get, keys)) for entry in entries.values()}) > 1:
        raise CheckpointError(
            "config.json gives types of layers different rotary positions, which mlx-lm does not "
            f"do for models of type {part.get('model_type')}: update mlx-lm"
        )


def _new_keys(part: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return `rope_parameters` in both forms at once: an entry for each type of layer, and the same
    settings at the top level. A family reads one of the two forms."""
    share = part.get("partial_rotary_factor")
    plain = {"rope_type": "default", "rope_theta": part.get("rope_theta")}
    plain |= {} if share is None else {"partial_rotary_factor": share}
    entries = _entries(part)
    main = {**plain, **(part.get("rope_scaling") or {}), **next(iter(entries.values()), {})}
    if NEW not in names or main["rope_theta"] is None:
        return {}
    local = next((part[name] for name in SECOND["sliding_attention"] if name in part), None)
    sliding = main if local is None else {**plain, "rope_theta": local}
    kinds = {*(part.get("layer_types") or ()), "full_attention"}
    both = {**main, **dict.fromkeys(kinds, main), "sliding_attention": sliding}
    return {NEW: {**both, **(part.get(NEW) or {})}}
