"""Targets whose own checkpoint carries layers for multi-token prediction draft with them, whatever
way the checkpoint is laid out, and write what they would alone."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_specdec import CheckpointError, OptionError, Options, convert, generate, load

from ..support import mtp, speculators, tiny
from ..support.families import config_of
from .support import numbered, quick

FILE = "mtp.safetensors"
FAMILIES = tuple(mtp.CONFIGS)
SPLIT = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe_lite", "glm_moe_dsa")
SIZE = 400
PROMPTS = [[5 + (3 + n) * at * at % 390 for at in range(4 + n)] for n in range(4)]
BEFORE = "model.layers.2."
"""A tensor of the layer in the files of GLM and DeepSeek: it follows those of the model."""
Drafts = list[tuple[int, ...]]
Sources = Callable[[str], tuple[Path, Any, Drafts]]
"""Returns a family's checkpoint in the layout of its makers, its pair, and the layers' drafts."""


def target(family: str, directory: Path, **settings: Any) -> Path:
    """A target with a tokenizer."""
    return numbered(mtp.write(family, directory, vocabulary=SIZE, **settings), SIZE)


def drafts(pair: Any, count: int = 3) -> Drafts:
    """What a pair's own layers draft after each prompt: all of it is accepted."""
    lenient = Options(max_tokens=count + 1, num_draft=count, proposer="mtp", delta=1.0)
    return [generate(pair, prompt, lenient).tokens[:count] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Each checkpoint is loaded once, since no test changes it."""

    @functools.cache
    def source(family: str) -> tuple[Path, Any, Drafts]:
        path = target(family, tmp_path_factory.mktemp(family))
        pair = load(path)
        return path, pair, drafts(pair)

    return source


def similar(one: Drafts, two: Drafts) -> bool:
    """Whether most drafts begin alike, as those of rounded weights should."""
    return sum(a[0] == b[0] for a, b in zip(one, two, strict=True)) > len(one) / 2


@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3_next"))
def test_every_layout_of_a_checkpoint_says_the_same(
    family: str, sources: Sources, tmp_path: Path
) -> None:
    """Norms around 0 in the makers' files and around 1 in those of MLX, experts apart or joined."""
    source, _, expected = sources(family)
    converted = convert(str(source), tmp_path / "converted").path
    assert drafts(load(converted)) == expected
    mlx = target(family, tmp_path / "mlx", original=False)
    assert drafts(load(mlx)) == expected
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", FILE):
        shutil.copyfile(converted / name, alone / name)
    without = target(family, tmp_path / "without", layer=False)
    pair = load(without, alone)
    assert pair.draft_name == str(alone)
    assert drafts(pair) == expected


@pytest.mark.parametrize("family", quick(SPLIT, "glm4_moe_lite"))
def test_folders_that_hold_the_layer_alone_draft_as_it_does(
    family: str, sources: Sources, tmp_path: Path
) -> None:
    without = target(family, tmp_path / "without", layer=False)
    folder = mtp.split(family, tmp_path / "layer", vocabulary=SIZE)
    pair, expected = load(without, folder), sources(family)[2]
    assert drafts(pair) == expected
    packed = mtp.split(family, tmp_path / "packed", vocabulary=SIZE, bits=8)
    small = load(without, packed)
    assert similar(drafts(small, count=1), expected)
    with pytest.raises(CheckpointError, match="a drafter of the kind mtp and no whole model"):
        load(folder)


def test_fewer_bits_are_taken_for_the_layer(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    source = target("glm4_moe", tmp_path / "source", **wide)
    full, small = load(source), load(source, draft_q_bits=8)
    assert small.draft_bytes < full.draft_bytes / 2
    assert similar(drafts(small, count=1), drafts(full, count=1))


def test_a_draft_that_is_named_drafts_in_the_layers_place(sources: Sources, tmp_path: Path) -> None:
    drafter = speculators.eagle3(tmp_path / "drafter", vocabulary=SIZE)
    pair = load(sources("glm4_moe")[0], drafter)
    assert generate(pair, PROMPTS[0], Options(num_draft=2)).labels.proposer == "eagle3"
    with pytest.raises(OptionError, match="or another drafter was named"):
        generate(pair, PROMPTS[0], Options(proposer="mtp"))


def unusable(directory: Path, message: str) -> None:
    """The target writes all the same; who asks for its layers is told why not."""
    pair = load(directory)
    assert generate(pair, PROMPTS[0], Options(max_tokens=3, cost_cache=False)).tokens
    with pytest.raises(OptionError, match=message):
        generate(pair, PROMPTS[0], Options(proposer="mtp"))


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("glm4_moe", {"layer": False}, "carries no layers .* mlx-lm's conversions drop"),
        ("glm4_moe", {"drop": "model.layers.2.enorm.weight"}, "pre_fc_norm_embedding.* missing"),
        ("glm4_moe", {"extra": {"model.layers.3.more.weight": mx.zeros((2,))}}, "and 13 more"),
        ("qwen3_next", {"drop": "mtp.layers.0.mlp.experts.2.up_proj.weight"}, "has shape .3,"),
        ("qwen3_next", {"mtp_use_dedicated_embeddings": True}, "an embedding of its own"),
    ],
)
def test_layers_that_cannot_be_used_leave_a_target_that_can(
    family: str, settings: dict, message: str, tmp_path: Path
) -> None:
    unusable(target(family, tmp_path / family, **settings), message)


def test_layers_of_other_families_are_named(tmp_path: Path) -> None:
    config = config_of("exaone_moe") | {"vocab_size": SIZE, "num_nextn_predict_layers": 1}
    weights = dict(tree_flatten(tiny.from_config(config).parameters()))
    weights["mtp.fc.weight"] = mx.zeros((32, 64))
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    unusable(numbered(tmp_path, SIZE), "exaone_moe' are not supported: those of deep")


def test_several_numbered_layers_draft_in_turn(sources: Sources, tmp_path: Path) -> None:
    """The first token is the first layer's, and the second another layer's."""
    one, pair, alone = sources("glm4_moe")
    weights = mx.load(str(one / "model.safetensors"))
    second = {
        name.replace(BEFORE, "model.layers.3."): array * (1.5 if array.ndim > 1 else 1)
        for name, array in weights.items()
        if name.startswith(BEFORE)
    }
    two = load(target("glm4_moe", tmp_path / "two", extra=second, num_nextn_predict_layers=2))
    both = drafts(two)
    assert [row[0] for row in alone] == [row[0] for row in both]
    assert [row[1] for row in alone] != [row[1] for row in both]
    plain = generate(pair, PROMPTS[0], Options(max_tokens=8, regular=True)).tokens
    options = Options(max_tokens=8, num_draft=3, proposer="mtp")
    assert generate(two, PROMPTS[0], options).tokens == plain


@pytest.mark.parametrize("delta", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_packs_of_mtplx_hold_quantized_layers(
    delta: bool, sources: Sources, tmp_path: Path
) -> None:
    """The file names no writer. Norms are around 1, or around 0 if config.json says so."""
    pack = target("qwen3_5", tmp_path / "pack", original=False)
    weights = mx.load(str(pack / "model.safetensors"))
    layers = {name: weights.pop(name) for name in list(weights) if name.startswith("mtp.")}
    for name, array in list(layers.items()):
        if array.ndim > 1 and array.shape[-1] % 32 == 0:
            parts = zip(("weight", "scales", "biases"), mx.quantize(array, 32, 8), strict=True)
            layers |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts}
        elif delta and array.ndim == 1:
            layers[name] = array - 1
    mx.eval(weights, layers)
    mx.save_safetensors(str(pack / "model.safetensors"), weights, {"format": "mlx"})
    mx.save_safetensors(str(pack / FILE), layers)
    if delta:
        config = json.loads((pack / "config.json").read_text())
        config["mtplx_mtp_norm_encoding"] = "delta_plus_one"
        (pack / "config.json").write_text(json.dumps(config))
    assert similar(drafts(load(pack), count=1), sources("qwen3_5")[2])
