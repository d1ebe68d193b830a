"""The contract of contexts, kept by T5: what may be taken back, and what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_specdec.errors import OptionError, PromptError, RewindError
from mlx_specdec.interfaces import FINAL, after
from mlx_specdec.models.joined import Joined
from mlx_specdec.models.loading import load_model, trainable
from mlx_specdec.models.number_format import twin_of
from mlx_specdec.models.self_draft import self_draft
from mlx_specdec.models.t5.context import EncoderDecoderModel
from mlx_specdec.models.t5.network import T5

from ..support.t5 import FIXTURES, SHAPE, SOURCE, TOKENS, built

FIXTURE = Path(__file__).parents[1] / "fixtures" / "t5" / "own-head-scaled"


@pytest.fixture(scope="module")
def model() -> EncoderDecoderModel:
    return load_model(FIXTURE, dtype="float32").model


def tokens(*ids: int) -> mx.array:
    return mx.array([ids], dtype=mx.int32)


def test_a_source_is_read_once_and_not_before_somebody_waits(model, monkeypatch) -> None:
    read, encode = [], type(model.network).encode

    def reading(network, sources, mask=None):
        read.append(sources.tolist())
        return encode(network, sources, mask)

    monkeypatch.setattr(type(model.network), "encode", reading)
    for begin in (lambda each: each.evaluate(), lambda each: each.advance(tokens(0))):
        context = model.open([5, 6, 1])
        assert read == []
        begin(context)
        assert read == [[[5, 6, 1]]]
        context.advance(tokens(7))
        assert len(read) == 1
        read.clear()


def test_only_proposed_tokens_can_be_taken_back(model) -> None:
    context = model.open([5, 6, 1])
    context.advance(tokens(0, 7, 8, 9), proposed=2)
    for wrong in (5, 1, -1):
        with pytest.raises(RewindError, match="4 were seen and 2 are final"):
            context.rewind((wrong,))
    context.rewind((3,))
    assert context.lengths == (3,)
    with pytest.raises(RewindError, match="3 are final"):
        context.rewind((2,))


@pytest.mark.parametrize(("prompt", "told"), [([], "empty"), ([5, 64], "64"), ([-1], "-1")])
def test_a_prompt_that_cannot_be_read_is_refused(model, prompt: list[int], told: str) -> None:
    with pytest.raises(PromptError, match=told):
        model.open(prompt)


def test_every_layer_of_the_decoder_shows_what_it_puts_out(model) -> None:
    names = [after(layer) for layer in range(model.layers)]
    fed = tokens(0, 7, 8)
    plain = model.open([5, 6, 1]).advance(fed)
    scores = model.open([5, 6, 1]).advance(fed, taps=(*names, FINAL))
    assert mx.array_equal(scores.logits, plain.logits) and not plain.hidden
    assert {scores.hidden[name].shape for name in names} == {(1, 3, model.width)}
    decoder = model.network.decoder
    normed = decoder.final_layer_norm(scores.hidden[names[-1]])
    scale = model.network.config.d_model**-0.5 if model.network.config.scales_output else 1.0
    assert mx.allclose(normed * scale, scores.hidden[FINAL])
    assert mx.allclose(model.embed(fed), model.network.shared(fed))
    with pytest.raises(OptionError, match=rf"'{after(model.layers)}'"):
        model.open([5, 6, 1]).advance(fed, taps=(after(model.layers),))


# Layers of a T5 that read the same states are one product, and nobody else notices.


WIDE = {**SHAPE, "d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 2048}


def logits(network: T5) -> np.ndarray:
    """Of layers that are as they are: nothing is joined here."""
    model = EncoderDecoderModel.__new__(EncoderDecoderModel)
    model.network, model._tables, model._reach = network, [], 0
    context = model.open(SOURCE)
    return np.array(context.advance(TOKENS).logits)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= 1e-6 * np.abs(other).max())


def wholes(network: nn.Module) -> list[bool]:
    """Of each module that has layers to join, whether it has joined them."""
    modules = [m for m in network.modules() if isinstance(m, Joined) and len(m._names) > 1]
    return [m._joined([m[name] for name in m._names]) is not None for m in modules]


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_joined_products_give_what_single_ones_give(feed_forward: str, bits: int | None) -> None:
    network = built(feed_forward_proj=feed_forward)
    if bits is not None:
        nn.quantize(network, 32, bits, class_predicate=lambda p, m: isinstance(m, nn.Linear))
    apart = logits(network)
    network.join()
    # 2 blocks: attention in both stacks and to the source, and what is gated.
    gated = 4 if feed_forward.startswith("gated") else 0
    assert wholes(network) == [True] * (6 + gated)
    assert close(logits(network), apart)


def test_names_and_numbers_of_the_parameters_stay() -> None:
    network = built()
    before = {name: np.array(array) for name, array in tree_flatten(network.parameters())}
    modules = [path for path, _ in network.named_modules()]
    network.join()
    after = dict(tree_flatten(network.parameters()))
    assert after.keys() == before.keys()
    assert all(np.array_equal(before[name], np.array(array)) for name, array in after.items())
    assert [path for path, _ in network.named_modules()] == modules


def test_joined_weights_are_in_memory_once() -> None:
    network = built(**WIDE)
    weights = sum(array.nbytes for _, array in tree_flatten(network.parameters()))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    network.join()
    assert mx.get_active_memory() <= before + weights // 100
    # Two matrices of 4 MB are joined at a time, of 48 MB.
    assert mx.get_peak_memory() - before < weights // 4
    assert mx.get_cache_memory() < weights // 100


def test_loading_takes_hardly_more_than_the_weights(tmp_path: Path) -> None:
    network = built(**WIDE)
    total = EncoderDecoderModel(network).nbytes
    config = json.loads((FIXTURES / "own-head-scaled" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **WIDE}))
    arrays = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    del network, arrays
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load_model(tmp_path, dtype="float32").model
    assert all(wholes(model.network))
    assert mx.get_active_memory() - before < 1.05 * total
    assert mx.get_peak_memory() - before < 1.3 * total


def test_layers_of_different_bits_stay_apart() -> None:
    network = built()

    def choose(path: str, module: nn.Module) -> Any:
        bits = 8 if path.endswith((".v", ".wi_1")) else 4
        return isinstance(module, nn.Linear) and {"group_size": 32, "bits": bits}

    nn.quantize(network, class_predicate=choose)
    apart = logits(network)
    network.join()
    assert not any(wholes(network))
    assert np.array_equal(logits(network), apart)


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_other_weights_count_at_once(part: str) -> None:
    network = built()
    if part == "scales":
        nn.quantize(network, 32, 8, class_predicate=lambda p, m: isinstance(m, nn.Linear))
    network.join()
    before = logits(network)
    layer = network.decoder.block[0].attention.v
    layer[part] = layer[part] * 2
    changed = logits(network)
    assert not close(changed, before)
    assert wholes(network).count(False) == 1
    network.join()
    assert all(wholes(network)) and close(logits(network), changed)


def test_a_twin_of_fewer_bits_is_joined_for_itself_and_shares_the_encoder() -> None:
    target = EncoderDecoderModel(built())
    before = logits(target.network)
    draft, _ = self_draft(target, 4, 32)
    assert all(wholes(draft.network)) and all(wholes(target.network))
    theirs, own = (m.network.encoder.block[0].attention._whole for m in (target, draft))
    assert own is theirs and own is not None
    assert np.array_equal(logits(target.network), before)
    assert not close(logits(draft.network), before)


def test_training_moves_every_layer_and_leaves_the_model_alone() -> None:
    model = EncoderDecoderModel(built())
    before = logits(model.network)
    trained = trainable(model)
    inputs = trained.inputs([SOURCE], [[3, 9, 4]])
    learn = nn.value_and_grad(trained.network, lambda *given: trained.logits(*given).square().sum())
    _, slopes = learn(*inputs)
    flat = dict(tree_flatten(slopes))
    for name in ("q", "k", "v"):
        assert mx.abs(flat[f"decoder.block.1.layer.0.SelfAttention.{name}.weight"]).max() > 0
    moved = tree_map(lambda w, slope: w - 0.01 * slope, trained.network.parameters(), slopes)
    trained.network.update(moved)
    fresh = built()
    fresh.update(moved)
    assert close(logits(trained.network), logits(fresh))
    assert np.array_equal(logits(model.network), before)
    assert all(wholes(twin_of(model.network)))
