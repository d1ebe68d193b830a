"""Changes to the classes, functions and modules of others are all in one table, and are undone."""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama, mamba2
from mlx_lm.models.ssm import ssm_update

import mlx_specdec
from mlx_specdec.checkpoints.files import Weights, read_config
from mlx_specdec.models import cpu_layers, exact, patches
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.cpu_layers import lighten
from mlx_specdec.models.mlx_lm import attention, latent, mends
from mlx_specdec.models.mlx_lm.loader import open_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel, cache_maker
from mlx_specdec.models.mlx_lm.network import capturing
from mlx_specdec.models.number_format import twin_of

from ..support import tiny
from ..support.families import config_of

PACKAGE = Path(mlx_specdec.__file__).parent
MODEL = PACKAGE.parent / "weights" / "py-llama"
HOOKS = {
    ("models/patches.py", "sys.modules"),
    ("system.py", "resource.setrlimit"),
    ("models/patches.py", "os.environ"),
    ("cli/app.py", "warnings.showwarning"),
    ("cli/app.py", "setattr(sys, name)"),
}
"""Targets of assignments that are allowed. Python documents that programs replace the last two."""


def changes(text: str) -> list[str]:
    """Return the attributes of imported objects, and the classes, that a module changes."""
    nodes = list(ast.walk(ast.parse(text)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [name for node in imports for name in node.names]
    imported = {(name.asname or name.name).split(".")[0] for name in names}
    found = []

    def foreign(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars":
            return bool(node.args) and foreign(node.args[0])
        return isinstance(node, ast.Name) and node.id in imported

    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "__class__":
            found.append(node.name)
        elif "__globals__" in (getattr(node, "attr", ""), getattr(node, "value", "")):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute | ast.Subscript):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            changed = not isinstance(node.ctx, ast.Load)
            if name in ("pop", "setdefault", "update", "clear"):
                changed = ast.unparse(node.value).endswith(("sys.modules", ".__dict__"))
            if changed and (name == "__class__" or foreign(node)):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            owner, name = node.args[:2]
            if foreign(owner) or ast.unparse(name) == "'__class__'":
                found.append(f"{ast.unparse(node.func)}({ast.unparse(owner)}, {ast.unparse(name)})")
    return found


def test_only_one_module_changes_what_belongs_to_others() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        found = changes(file.read_text(encoding="utf-8"))
        wrong += [
            f"{name}: {change}"
            for change in found
            if not any(name == module and change.startswith(hook) for module, hook in HOOKS)
        ]
    assert wrong == []


Originals = list[tuple[Any, str, Any]]


def _classes(modules: Sequence[nn.Module], change: Callable[[], Any]) -> Originals:
    originals = [(module, "__class__", type(module)) for module in modules]
    change()
    return originals


def _attention() -> Originals:
    attention.replace_in(tiny.build("llama"))
    return [(llama, attention.ATTENTION_FUNCTION, base.scaled_dot_product_attention)]


def _quantized() -> Originals:
    cache_maker(tiny.build("llama", head_dim=32), CacheSettings(8, 32))
    return [(base, "quantized_scaled_dot_product_attention", attention._all_rows)]


def _light() -> Originals:
    network = nn.Sequential(nn.RoPE(8), nn.Linear(8, 8, bias=False))
    return _classes(network.layers, lambda: lighten(network))


def _latent() -> Originals:
    attentions = latent.expanding(tiny.from_config(config_of("deepseek_v3")))
    return _classes([a.embed_q for a in attentions], lambda: latent.intercept(attentions))


def _captures() -> Originals:
    layers = tiny.build("llama").layers
    return _classes(layers, lambda: (capturing(*layers), capturing(layers[0])))


def _recorded() -> Originals:
    model = DecoderOnlyModel(tiny.build("mamba2"))
    mixer = model.network.layers[0].mixer
    return _classes([mixer, mixer.in_proj], lambda: model.open([0]))


def _products() -> Originals:
    for owner in (mx.array, mx):
        patches.PRODUCTS.undo(owner)
    originals = [(mx.array, "__matmul__", mx.array.__matmul__), (mx, "matmul", mx.matmul)]
    exact.pad_products()
    return originals


def _recurrences() -> Originals:
    patches.RECURRENCES.undo(mamba2)
    attention.divide_recurrences(tiny.build("mamba2"))
    return [(mamba2, "ssm_update", ssm_update)]


def _mended(kind: str, find: Callable[[Any], Any], **changes: Any) -> Callable[[], Originals]:
    """Return a function that mends a tiny network, and returns the class of what is extended."""

    def apply() -> Originals:
        config = config_of(kind) | changes
        network = tiny.from_config(config)
        owner = find(network)
        return _classes([owner], lambda: mends.mend(network, config))

    return apply


def _rotary() -> Originals:
    config = config_of("glm")
    network = tiny.from_config(config)
    rope = network.layers[0].self_attn.rope
    originals = [(rope, "dims", rope.dims)]
    mends.mend(network, config)
    return originals


def _time_steps() -> Originals:
    config = config_of("nemotron_h") | {"time_step_min": 0.5}
    network = tiny.from_config(config)
    mixers = [m for m in network.modules() if "time_step_limit" in vars(m)]
    originals = [(mixer, "time_step_limit", mixer.time_step_limit) for mixer in mixers]
    mends.mend(network, config)
    return originals


APPLIED: dict[patches.Replacement, Callable[[], Originals]] = {
    patches.ATTENTION: _attention,
    patches.QUANTIZED_ATTENTION: _quantized,
    patches.LIGHT_LAYERS: _light,
    patches.LATENT: _latent,
    patches.HIDDEN_STATES: _captures,
    patches.RECORDED: _recorded,
    patches.PRODUCTS: _products,
    patches.RECURRENCES: _recurrences,
    patches.WINDOWS: _mended("starcoder2", lambda network: network.layers[0], sliding_window=4),
    patches.ROTARY: _rotary,
    patches.ACTIVATION: _mended("gemma", lambda network: network.layers[0].mlp),
    patches.SCALES: _mended("gemma3_text", lambda network: network.model.embed_tokens),
    patches.CAPS: _mended("gemma3_text", lambda network: network, final_logit_softcapping=3.0),
    patches.TIME_STEPS: _time_steps,
    patches.NORMS: _mended(
        "falcon_h1",
        lambda network: network.layers[0].mamba.norm,
        mamba_rms_norm=True,
        mamba_n_groups=2,
    ),
    patches.ROUTING: _mended("jamba", lambda network: network.layers[1].feed_forward),
}
"""How the package applies a patch. Returns owners, the names of attributes, and what these were."""
BRIEF = {patches.FAST_START, patches.WATCHED, patches.CAUGHT_WEIGHTS}
"""The package undoes these itself, the first in a test of test_loading.py."""


def test_the_table_names_every_patch() -> None:
    every = [patch for patch in vars(patches).values() if isinstance(patch, patches.Patch)]
    assert set(patches.PATCHES) == set(every) == BRIEF.union(APPLIED)
    assert len({patch.replaces for patch in patches.PATCHES}) == len(every) == len(patches.PATCHES)


@pytest.mark.parametrize("patch", APPLIED, ids=[change.__name__ for change in APPLIED.values()])
def test_what_was_replaced_is_restored(
    patch: patches.Replacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layers, "on_cpu", lambda: True)
    for owner, name, original in APPLIED[patch]():
        assert patch.applied(owner) and getattr(owner, name) is not original
        patch.undo(owner)
        assert not patch.applied(owner) and getattr(owner, name) is original


def test_a_loaded_model_has_its_own_classes() -> None:
    source = Weights(MODEL)
    tensors = {name: source.read(name) for name in source.infos}
    model = open_model(MODEL, read_config(MODEL), source, tensors).model
    assert type(model) is llama.Model
    assert type(model.layers[0]) is llama.TransformerBlock


def test_a_patch_is_undone_with_the_later_ones_of_its_owner_and_of_no_copy() -> None:
    first, second = (patches.Replacement(name, "for a test") for name in ("first", "second"))
    module = nn.Identity()
    first.extend([module], __call__=lambda plain, module, value: 10 * plain(module, value))
    twin = twin_of(module)
    second.extend([module], __call__=lambda plain, module, value: plain(module, value) + 1)
    assert (module(3), twin(3)) == (31, 30)
    assert second.applied(module) and not second.applied(twin)
    second.undo(twin)
    first.undo(module)
    assert (module(3), twin(3)) == (3, 30) and type(module) is nn.Identity
