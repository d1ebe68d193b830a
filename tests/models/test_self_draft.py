"""Self-drafting: the target's own layers at fewer bits, sharing what is not packed."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import seed_oss

from mlx_specdec import Options, generate, load
from mlx_specdec.errors import OptionError
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.self_draft import quantized_twin, self_draft
from mlx_specdec.models.t5 import T5, T5Config

from ..support import tiny
from ..support.families import config_of
from ..support.pairs import PROMPT, pair_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5"
TOKENS = mx.array([[3, 9, 4, 33, 7]])


def arrays(network: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "mamba2"])
def test_fewer_bits_are_further_from_the_target(name: str) -> None:
    network = tiny.build(name)
    expected = network(TOKENS)
    errors = []
    for bits in (8, 4, 2):
        twin = quantized_twin(network, bits, 32)
        errors.append(mx.abs(twin(TOKENS) - expected).mean().item())
    assert 0 < errors[0] < errors[1] < errors[2]
    assert mx.array_equal(network(TOKENS), expected)


def test_of_a_t5_only_the_decoder_is_packed() -> None:
    config = json.loads((FIXTURES / "own-head-scaled" / "config.json").read_text())
    shape = T5Config.from_dict(
        {**config, "d_model": 32, "d_ff": 64, "vocab_size": 50}, own_head=True
    )
    network = T5(shape)
    twin = quantized_twin(network, 4, 32)
    packed = {path for path, module in twin.named_modules() if hasattr(module, "bits")}
    assert packed and not any(path.startswith(("encoder", "shared")) for path in packed)
    assert "lm_head" in packed


def test_packed_targets_are_packed_further_or_refused() -> None:
    network = quantized_twin(tiny.build("llama"), 8, 32)
    twin = quantized_twin(network, 4, 32)
    assert twin.lm_head.bits == 4 and network.lm_head.bits == 8
    before, after = network(TOKENS), twin(TOKENS)
    assert 0 < mx.abs(before - after).mean().item() < 1
    with pytest.raises(OptionError, match="fewer draft-bits"):
        quantized_twin(network, 8, 32)


def test_a_tied_head_that_reads_past_its_layer_is_one_sentence() -> None:
    config = {**tiny.CONFIGS["llama"], "model_type": "seed_oss", "tie_word_embeddings": True}
    config |= {"attention_bias": False, "attention_out_bias": False}
    network = seed_oss.Model(seed_oss.ModelArgs.from_dict(config))
    with pytest.raises(OptionError, match="own layers cannot draft") as caught:
        self_draft(DecoderOnlyModel(network), 4, 32)
    assert "\n" not in str(caught.value)


SKIPPING: dict[str, dict[str, object]] = {
    "llama_sliding": {},
    "qwen2": {"num_hidden_layers": 4},
    "gemma3": {"num_hidden_layers": 8},
    "gemma3_wrapped": {},
    "gpt_oss": {},
    "mamba2": {},
    "qwen3_next": {},
    "falcon_h1": {"num_hidden_layers": 3},
    "recurrent_gemma": {},
    "llama4": {},
    "lfm2": {},
}


@pytest.mark.parametrize("name", SKIPPING)
def test_any_number_of_layers_drafts_and_keeps_the_text(name: str) -> None:
    """Caches of layers that are left out were never filled, and masks came from other places."""
    target = DecoderOnlyModel(tiny.build(name, **SKIPPING[name]))
    options = Options(max_tokens=12, temperature=1.0, seed=3, num_draft=3, cost_cache=False)
    plain = generate(pair_of(target, None), PROMPT, options).tokens
    for layers in sorted({1, target.layers - 1, target.layers}):
        draft, added = self_draft(target, None, layers=layers)
        assert added == 0
        result = generate(pair_of(target, draft), PROMPT, options)
        assert result.tokens == plain
        assert result.stats.drafted > 0
    # All layers draft what the target says.
    assert result.stats.accepted == result.stats.drafted


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "qwen3_next"])
def test_chosen_layers_compute_the_same_in_one_pass_and_in_many(name: str) -> None:
    target = DecoderOnlyModel(tiny.build(name, num_hidden_layers=8))
    draft, _ = self_draft(target, None, layers=3)
    tokens = mx.array([[*PROMPT, *PROMPT]])
    together = draft.open([1]).advance(tokens).logits
    context = draft.open([1])
    alone = [context.advance(tokens[:, at : at + 1]).logits for at in range(tokens.shape[1])]
    assert mx.allclose(together, mx.concatenate(alone, axis=1), atol=1e-4)


def test_chosen_layers_are_those_of_the_target() -> None:
    network = tiny.build("llama", num_hidden_layers=4)
    draft, _ = self_draft(DecoderOnlyModel(network), None, layers=2)
    network.model.layers = [network.model.layers[0], network.model.layers[3]]
    assert mx.allclose(draft.network(TOKENS), network(TOKENS), atol=1e-5)


def test_layers_that_are_left_out_take_no_memory_at_fewer_bits() -> None:
    target = DecoderOnlyModel(tiny.build("llama", num_hidden_layers=4))
    draft, added = self_draft(target, 4, 32, layers=2)
    of_all = self_draft(target, 4, 32)[1]
    assert 0 < added < of_all
    sizes = {array.size for path, array in arrays(draft.network).items() if "layers.1." in path}
    assert sizes == {0}


def test_a_model_that_needs_all_its_layers_is_one_sentence() -> None:
    target = DecoderOnlyModel(tiny.from_config(config_of("iquestloopcoder")))
    with pytest.raises(OptionError, match="cannot draft without the others"):
        self_draft(target, None, layers=1)


@pytest.mark.parametrize(
    ("target", "draft", "noted"),
    [
        ("py-llama", "self:1", True),
        ("py-llama", "self:8", False),  # all layers
        ("py-llama", "self", False),
        ("t5-enfr", "self:1", False),  # it reads the same source, and often agrees
    ],
)
def test_untrained_layers_are_said_to_agree_rarely(target: str, draft: str, noted: bool) -> None:
    notes = load(f"weights/{target}", draft).notes
    assert any("rarely agree" in note for note in notes) is noted
