"""Targets whose own checkpoint carries layers for multi-token prediction draft with them, whatever
way the checkpoint is laid out, and write what they would alone."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints.mtp_layers import FILE
from mlx_specdec.conversion.convert import convert
from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import CheckpointError, OptionError
from mlx_specdec.models.drafters import mtp_files
from mlx_specdec.models.mlx_lm import latent
from mlx_specdec.models.mlx_lm.latent import absorbed_calls
from mlx_specdec.options import Options

from ..support import mtp, speculators, tiny
from ..support.tokenizers import byte_level

FAMILIES = tuple(mtp.CONFIGS)
SPLIT = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe_lite", "glm_moe_dsa")
SIZE = 400
TEXT = "some text"
BEFORE = "model.layers.2."
"""A tensor of the layer in the files of GLM and DeepSeek: it follows those of the model."""


def target(family: str, directory: Path, **settings) -> Path:
    """A target with a tokenizer."""
    mtp.write(family, directory, vocabulary=SIZE, **settings)
    return byte_level(directory)


def logits_of(pair: Pair, length: int = 12, count: int = 3) -> mx.array:
    """What a pair's own layer says of `count` tokens behind a random text."""
    assert pair.drafter_network is not None
    keys = mx.random.split(mx.random.key(1))
    hidden = mx.random.normal((1, length, pair.target.width), key=keys[0])
    tokens = mx.random.randint(0, SIZE, (1, length + count), key=keys[1])
    reading = pair.drafter_network.open()
    reading.read(hidden, tokens[:, :length])
    rows = [reading.guess(count)]
    for at in range(length, length + count - 1):
        rows.append(reading.guess_after(tokens[:, at : at + 1]))
    assert pair.drafter_network.taps == ("final",)
    return mx.concatenate(rows, axis=1)


def apart(one: mx.array, two: mx.array) -> float:
    return mx.max(mx.abs(one - two)).item()  # type: ignore[return-value]


def slow_but(*fast: str) -> list:
    """All families, of which the suite for every day tries some."""
    return [
        pytest.param(family, marks=() if family in fast else pytest.mark.slow)
        for family in FAMILIES
    ]


@pytest.mark.parametrize("family", slow_but("qwen3_next"))
def test_every_layout_of_a_checkpoint_says_the_same(family: str, tmp_path: Path) -> None:
    """Norms around 0 in the makers' files and around 1 in those of MLX, experts apart or joined."""
    source = target(family, tmp_path / "source")
    expected = logits_of(loading.load(source))
    converted = convert(str(source), tmp_path / "converted").path
    assert apart(logits_of(loading.load(converted)), expected) == 0
    mlx = target(family, tmp_path / "mlx", original=False)
    assert apart(logits_of(loading.load(mlx)), expected) < 1e-4
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", FILE):
        shutil.copyfile(converted / name, alone / name)
    without = target(family, tmp_path / "without", layer=False)
    pair = loading.load(without, alone)
    assert pair.draft_name == str(alone)
    assert apart(logits_of(pair), expected) < 1e-4


@pytest.mark.parametrize("family", SPLIT)
def test_folders_that_hold_the_layer_alone_draft_as_it_does(family: str, tmp_path: Path) -> None:
    expected = logits_of(loading.load(target(family, tmp_path / "source")))
    without = target(family, tmp_path / "without", layer=False)
    folder = mtp.split(family, tmp_path / "layer", vocabulary=SIZE)
    pair = loading.load(without, folder)
    assert pair.drafter_network is not None and pair.drafter_network.kind == "mtp"
    assert apart(logits_of(pair), expected) < 1e-4
    packed = mtp.split(family, tmp_path / "packed", vocabulary=SIZE, bits=8)
    small = loading.load(without, packed)
    assert 0 < apart(logits_of(small, count=1), logits_of(pair, count=1)) < 0.5
    with pytest.raises(CheckpointError, match="a drafter of the kind mtp and no whole model"):
        loading.load(folder)


def test_fewer_bits_are_taken_for_the_layer(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    source = target("glm4_moe", tmp_path / "source", **wide)
    full, small = loading.load(source), loading.load(source, draft_q_bits=8)
    assert full.drafter_network is not None and small.drafter_network is not None
    assert small.draft_bytes < full.draft_bytes / 2
    assert not hasattr(small.drafter_network.fc, "bits"), (
        "all that it knows of the target goes through"
    )
    assert 0 < apart(logits_of(small, count=1), logits_of(full, count=1)) < 0.5


@pytest.mark.parametrize("part", ["self_attn.q_proj", "eh_proj"])
def test_layers_that_mlx_has_quantized_are_read(part: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    source = target("glm4_moe", tmp_path / "source", original=False, **wide)
    expected = logits_of(loading.load(source), count=1)
    weights = mx.load(str(source / "model.safetensors"))
    path = f"{BEFORE}{part}"
    packed = mx.quantize(weights[f"{path}.weight"], 64, 8)
    for kind, array in zip(("weight", "scales", "biases"), packed, strict=True):
        weights[f"{path}.{kind}"] = array
    mx.save_safetensors(str(source / "model.safetensors"), weights, {"format": "mlx"})
    assert 0 < apart(logits_of(loading.load(source), count=1), expected) < 0.5


def test_a_draft_that_is_named_drafts_in_the_layers_place(tmp_path: Path) -> None:
    source = target("glm4_moe", tmp_path / "source")
    drafter = speculators.eagle3(tmp_path / "drafter", vocabulary=SIZE)
    pair = loading.load(source, drafter)
    assert pair.drafter_network is not None and pair.drafter_network.kind == "eagle3"
    with pytest.raises(OptionError, match="or another drafter was named"):
        generate(pair, TEXT, Options(proposer="mtp"))


def unusable(directory: Path, message: str) -> None:
    """The target writes all the same; who asks for its layers is told why not."""
    pair = loading.load(directory)
    assert pair.drafter_network is None
    assert generate(pair, TEXT, Options(max_tokens=3, cost_cache=False)).tokens
    with pytest.raises(OptionError, match=message):
        generate(pair, TEXT, Options(proposer="mtp"))


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("glm4_moe", {"layer": False}, "carries no layers .* mlx-lm's conversions drop"),
        ("glm4_moe", {"drop": "model.layers.2.enorm.weight"}, "pre_fc_norm_embedding.* missing"),
        ("glm4_moe", {"extra": {"model.layers.3.more.weight": mx.zeros((2,))}}, "and 13 more"),
        ("qwen3_next", {"drop": "mtp.layers.0.mlp.experts.2.up_proj.weight"}, "KeyError: 2"),
        ("qwen3_next", {"mtp_use_dedicated_embeddings": True}, "an embedding of its own"),
    ],
)
def test_layers_that_cannot_be_used_leave_a_target_that_can(
    family: str, settings: dict, message: str, tmp_path: Path
) -> None:
    unusable(target(family, tmp_path / family, **settings), message)


def test_layers_of_other_families_are_named(tmp_path: Path) -> None:
    source = byte_level(tiny.write("llama", tmp_path / "exaone", vocab_size=SIZE))
    config = json.loads((source / "config.json").read_text())
    names = {"model_type": "exaone_moe", "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps({**config, **names}))
    weights = mx.load(str(source / "model.safetensors"))
    weights["mtp.fc.weight"] = mx.zeros((32, 64))
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match="exaone_moe' are not supported: those of deep"):
        mtp_files.of_target(source, {**config, **names})


def test_several_numbered_layers_draft_in_turn(tmp_path: Path) -> None:
    """The first token is the first layer's, and the second another layer's."""
    one = target("glm4_moe", tmp_path / "one")
    weights = mx.load(str(one / "model.safetensors"))
    second = {
        name.replace(BEFORE, "model.layers.3."): array * (1.5 if array.ndim > 1 else 1)
        for name, array in weights.items()
        if name.startswith(BEFORE)
    }
    two = target("glm4_moe", tmp_path / "two", extra=second, num_nextn_predict_layers=2)
    alone, both = logits_of(loading.load(one)), logits_of(loading.load(two))
    assert apart(alone[:, :1], both[:, :1]) == 0 < apart(alone[:, 1], both[:, 1])
    plain = generate(loading.load(one), TEXT, Options(max_tokens=8, regular=True)).tokens
    options = Options(max_tokens=8, num_draft=3, proposer="mtp")
    assert generate(loading.load(two), TEXT, options).tokens == plain


@pytest.mark.parametrize("delta", [False, True])
def test_packs_of_mtplx_hold_quantized_layers(delta: bool, tmp_path: Path) -> None:
    """The file names no writer. Norms are around 1, or around 0 if config.json says so."""
    expected = logits_of(loading.load(target("qwen3_5", tmp_path / "source")), count=1)
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
    assert 0 < apart(logits_of(loading.load(pack), count=1), expected) < 0.5


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_rows_of_a_layer_with_a_latent_are_absorbed(family: str, tmp_path: Path) -> None:
    pair = loading.load(target(family, tmp_path / family))
    assert pair.drafter_network is not None
    hidden = mx.random.normal((1, 9, pair.target.width), key=mx.random.key(1))
    tokens = mx.random.randint(0, SIZE, (1, 9), key=mx.random.key(2))

    def last(rows: int) -> mx.array:
        reading = pair.drafter_network.open()
        for start in (0, *range(5, 9, rows)):
            end = start + rows if start else 5
            reading.read(hidden[:, start:end], tokens[:, start:end])
        return reading.guess(1)

    before, single = absorbed_calls(), last(1)
    first = absorbed_calls() - before
    assert apart(last(4), single) < 1e-5
    assert absorbed_calls() - before == 2 * first + 1, "the first five rows, and the four"
    latent.release(latent.expanding(pair.drafter_network))
    before, expanded = absorbed_calls(), last(4)
    assert absorbed_calls() == before and apart(expanded, single) < 1e-4
