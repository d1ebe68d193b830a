"""Models whose passes over several rows mean something else are decoded plainly, with a word."""

import warnings

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_specdec.models import cpu_layers
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm import trials
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.families import config_of
from ..support.pairs import model_of

WRONG = ("phi3small",)
MANTISSA = 0xFFFFE000
"""The bits of a float32 number that TF32 keeps: sign, exponent and 10 bits of mantissa."""


@pytest.fixture
def not_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for an accelerator by the trials, and by what replaces layers on a CPU."""
    for module in (trials, cpu_layers):
        monkeypatch.setattr(module, "on_cpu", lambda: False)


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch, not_on_cpu: None) -> None:
    """Linear layers truncate inputs and weights to TF32 if a pass has several rows."""

    def cut(numbers: mx.array) -> mx.array:
        return (numbers.view(mx.uint32) & mx.array(MANTISSA, mx.uint32)).view(mx.float32)

    def call(layer: nn.Linear, inputs: mx.array) -> mx.array:
        weight, several = layer.weight, inputs.size > inputs.shape[-1]
        product = cut(inputs) @ cut(weight).T if several else inputs @ weight.T
        return product + layer.bias if "bias" in layer else product

    monkeypatch.setattr(nn.Linear, "__call__", call)


@pytest.mark.parametrize("family", sorted(tiny.CONFIGS))
def test_rows_agree_if_an_accelerator_multiplies_several_of_them_in_tf32(
    tf32: None, family: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DecoderOnlyModel(tiny.build(family)).rows_agree


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("name", WRONG)
def test_a_family_that_is_wrong_is_reported_once(name: str, dtype: mx.Dtype) -> None:
    model = model_of(name, dtype)
    with pytest.warns(RuntimeWarning, match=f"mlx-lm's {name} models") as caught:
        assert not model.rows_agree
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not model.rows_agree
    assert len(caught) == 1


@pytest.mark.parametrize("window", [1 << 20, 1 << 31, 10**20])
def test_a_window_wider_than_memory_costs_nothing(window: int) -> None:
    network = tiny.from_config(config_of("llama"))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert DecoderOnlyModel(network, caches=CacheSettings(max_size=window)).rows_agree
    assert mx.get_peak_memory() - before < 1 << 28
