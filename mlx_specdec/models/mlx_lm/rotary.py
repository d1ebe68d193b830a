"""The rotary settings of config.json in the words of each of mlx-lm's families.

transformers 5 writes `rope_parameters`: one entry, or one for each type of layer. Earlier versions
wrote `rope_theta`, `rope_scaling` and others. Most of mlx-lm's families read one of the two, and
take a default in place of the other."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from inspect import signature
from typing import Any

import mlx.nn as nn

from ...errors import CheckpointError

NEW = "rope_parameters"
GLOBAL = ("full_attention", "main")
"""The entries of `rope_parameters` that hold what was `rope_theta`, for layers that see all."""
SECOND = {
    "sliding_attention": ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta"),
    "compress": ("compress_rope_theta",),
}
"""Other entries, and the names that families have for the base of such layers."""
SAME_BASE = ("olmo3",)
"""Families whose types of layers differ in how positions are scaled, though not in the base."""
PLAIN = ("default", "mrope")
"""Types that scale no positions of a text."""
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
"""Type -> part of the names of the classes with which mlx-lm's families compute it."""


def kind_of(settings: Mapping[str, Any]) -> str:
    """Return the type of `rope_scaling`, of `rope_parameters`, or of an entry of the latter."""
    return str(settings.get("rope_type") or settings.get("type") or "default")


def scaling(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how positions are scaled, in either spelling, or None. part: config.json, or its
    `text_config`. If types of layers differ, the layers that scale positions count."""
    old = part.get("rope_scaling")
    entries = [old] if isinstance(old, Mapping) and old else _entries(part).values()
    return next((entry for entry in entries if kind_of(entry) not in PLAIN), None)


def spelled_old(config: Mapping[str, Any], arguments: type) -> dict[str, Any]:
    """Return config.json with the keys of earlier versions that the family reads, in `text_config`
    as well. `rope_parameters` overrule all old keys unless there is `rope_scaling`, as transformers
    has it.

    arguments: The class that mlx-lm's family reads config.json into.
    Raises CheckpointError if layers are to differ in a way that the family does not know."""
    names = names_of(arguments)
    return _with_parts(config, lambda part: {**part, **_old_keys(part, names)})


def spelled_both(config: Mapping[str, Any], arguments: type) -> dict[str, Any]:
    """Return the same, and `rope_parameters` for families that read nothing else."""
    names = names_of(arguments)
    old = spelled_old(config, arguments)
    return _with_parts(old, lambda part: {**part, **_new_keys(part, names)})


def check(network: nn.Module, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a complete network does not scale positions as config.json says:
    many families ignore types that they do not know."""
    inner = config.get("text_config")
    settings = scaling(inner if isinstance(inner, Mapping) else config)
    if settings is None or settings.get("factor") == 1:
        return
    kind = kind_of(settings)
    ropes = {(type(m).__name__, getattr(m, "scale", 1.0)) for m in network.modules() if _turns(m)}
    computed = {name for name, part in CLASSES.items() for rope, _ in ropes if part in rope}
    if any(scale != 1.0 for _, scale in ropes):
        computed.add("linear")
    if kind not in computed:
        raise CheckpointError(
            f"config.json scales positions by the type {kind!a:.40}, which mlx-lm ignores for "
            f"{config.get('model_type')}: update mlx-lm, or take the type out of config.json"
        )


def _turns(module: nn.Module) -> bool:
    return any(word in type(module).__name__ for word in ("RoPE", "Rotary"))


def _with_parts(
    config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Change config.json and its `text_config`."""
    changed = change(config)
    if isinstance(inner := config.get("text_config"), Mapping):
        changed["text_config"] = change(inner)
    return changed


def names_of(arguments: type) -> set[str]:
    """Return the names of all settings that a family and its text model read."""
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
    """Return `rope_parameters` by type of layer, the layers that see all first; "" is any type."""
    settings = part.get(NEW)
    if not isinstance(settings, Mapping) or not settings:
        return {}
    nested = {name: entry for name, entry in settings.items() if isinstance(entry, Mapping)}
    first = {name: nested[name] for name in GLOBAL if name in nested}
    return {**first, **nested} or {"": settings}


def _old_keys(part: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    entries = _entries(part)
    if not entries:
        return {}
    main = next(iter(entries.values()))
    _check_types_of_layers(part, entries, names)
    settings = scaling({NEW: part[NEW]})
    base, (share, width) = main.get("rope_theta"), _share(part, main)
    old = {
        "rope_theta": base,
        "rotary_emb_base": base,
        "partial_rotary_factor": share,
        "rotary_pct": share,
        "rotary_dim": width,
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


def _share(part: Mapping[str, Any], main: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the share of a head's width that is rotated, and this width, None if unknown."""
    share, head = main.get("partial_rotary_factor"), part.get("head_dim")
    if not isinstance(share, int | float) or not isinstance(head, int):
        return share, None
    return share, int(share * head)


def _check_types_of_layers(
    part: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]], names: set[str]
) -> None:
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
    """Return `rope_parameters` by type of layer and for all layers; a family reads one."""
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
