"""Layers of the CPU back end with fewer operations: the same bits as MLX's own."""

import io
from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.compare import as_mlx_has_it
from mlx_specdec.errors import OptionError
from mlx_specdec.models import cpu_layers
from mlx_specdec.models.cpu_layers import SUBMIT, lighten, submit_every
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.families import config_of


def operations(*arrays: mx.array) -> int:
    written = io.StringIO()
    mx.export_to_dot(written, *arrays)
    return written.getvalue().count("rectangle")


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3", "stablelm"])
def test_a_network_keeps_its_bits_and_its_names(name: str) -> None:
    light = tiny.from_config(config_of(name))
    names = [name for name, _ in tree_flatten(light.parameters())]
    lighten(light)
    plain = as_mlx_has_it(light)
    assert [name for name, _ in tree_flatten(light.parameters())] == names
    kinds = [type(module).__name__ for module in light.modules()]
    assert kinds == [type(module).__name__ for module in plain.modules()]
    assert all(type(m).__module__ != lighten.__module__ for m in plain.modules())
    caches = [make_prompt_cache(network) for network in (light, plain)]
    counts = []
    for tokens in ([[1, 2, 3, 4, 5]], [[6]], [[7, 8]]):
        logits = [n(mx.array(tokens), cache=c) for n, c in zip((light, plain), caches, strict=True)]
        counts.append([operations(array) for array in logits])
        assert mx.array_equal(*logits)
    assert all(few < many for few, many in counts)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[mx.array]]:
    """Records the layers' results that are submitted, off the CPU."""
    states: list[mx.array] = []
    monkeypatch.setattr(cpu_layers, "on_cpu", lambda: False)
    monkeypatch.setattr(cpu_layers.mx, "async_eval", states.append)
    cpu_layers._layers.set(0)
    submit_every.cache_clear()
    yield states
    submit_every.cache_clear()


@pytest.mark.parametrize(("every", "of_ten"), [("", 0), ("1", 10), ("2", 5), ("3", 3), ("11", 0)])
def test_a_gpu_begins_with_every_nth_layer_if_a_variable_says_so(
    every: str, of_ten: int, submitted: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUBMIT, every)
    model = DecoderOnlyModel(tiny.build("llama", num_hidden_layers=5))
    for token in (1, 2):
        model.run(mx.array([[token]]), make_prompt_cache(model.network))
    assert len(submitted) == of_ten
    assert all(states.shape == (1, 1, model.width) for states in submitted)


@pytest.mark.parametrize("wrong", ["0", "-1", "2.5", "all"])
def test_a_wrong_number_of_layers_is_refused_where_a_model_is_made(
    wrong: str, submitted: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.build("llama")
    monkeypatch.setenv(SUBMIT, wrong)
    with pytest.raises(OptionError, match=f"{SUBMIT} must be a whole number.*'{wrong}'"):
        DecoderOnlyModel(network)
