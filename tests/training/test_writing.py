"""Texts written side by side are those that plain decoding writes one by one."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import assemble
from mlx_specdec.assemble import Pair, generate
from mlx_specdec.errors import PromptError
from mlx_specdec.models.decoder_only import DecoderOnlyModel
from mlx_specdec.options import Options
from mlx_specdec.training import writing
from mlx_specdec.training.writing import Order, batches, write

from .. import tiny
from ..cli.conftest import make_llama, make_t5

TEXTS = ["some words", "other words than these and more of them", "a", "words again and again"]


@pytest.fixture(scope="module", params=["llama", "t5"])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    make = make_llama if request.param == "llama" else make_t5
    return assemble.load(make(tmp_path_factory.mktemp(request.param)))


def orders_of(pair: Pair) -> list[Order]:
    """Prompts, rooms and seeds that all differ."""
    prompts = [tuple(pair.tokenizer.encode(text)) for text in TEXTS]
    return [Order(prompt, 12 + 5 * at, at) for at, prompt in enumerate(prompts)]


def plain(pair: Pair, order: Order, temperature: float) -> tuple[int, ...]:
    asked = Options(max_tokens=order.room, regular=True, temperature=temperature, seed=order.seed)
    return generate(pair, order.prompt, asked).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_text_is_what_plain_decoding_writes(pair: Pair, temperature: float) -> None:
    orders = orders_of(pair)
    assert len({len(order.prompt) for order in orders}) == len(orders)
    expected = [plain(pair, order, temperature) for order in orders]
    assert write(pair, orders, temperature) == expected
    assert write(pair, orders[2:3], temperature) == expected[2:3]


def test_a_text_ends_behind_its_own_end_token(pair: Pair) -> None:
    orders = orders_of(pair)
    free = write(replace(pair, eos_token_ids=frozenset()), orders, 1.0)
    end = max(free, key=len)[1]
    ending = replace(pair, eos_token_ids=frozenset({end}))
    found = write(ending, orders, 1.0)
    assert any(text[-1] == end for text in found)
    for text, longer in zip(found, free, strict=True):
        cut = longer[: longer.index(end) + 1] if end in longer else longer
        assert text == cut


def test_long_prompts_are_seen_in_several_passes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = orders_of(pair)
    longer = [replace(order, prompt=order.prompt * 4) for order in orders]
    expected = write(pair, longer, 0.0)
    monkeypatch.setattr(writing, "PASS", 8)
    assert write(pair, longer, 0.0) == expected


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3", "mamba2"])
def test_windows_and_recurrent_states_see_several_texts(family: str) -> None:
    model = DecoderOnlyModel(tiny.build(family), 4096)
    texts = np.random.default_rng(0).integers(0, tiny.VOCABULARY, (3, 2 * tiny.WINDOW))
    advance = model.open_batch(texts.tolist())
    together = mx.concatenate(
        [
            advance(mx.array(texts[:, :5])),
            *(advance(mx.array(texts[:, 5:])[:, at : at + 1]) for at in range(texts.shape[1] - 5)),
        ],
        axis=1,
    )
    for row, text in enumerate(texts):
        alone = model.open_batch([text.tolist()])
        expected = mx.concatenate(
            [alone(mx.array(text)[None, at : at + 1]) for at in range(len(text))], axis=1
        )
        np.testing.assert_allclose(np.array(together[row]), np.array(expected[0]), atol=2e-4)


def test_prompts_that_the_model_does_not_take_are_refused(pair: Pair) -> None:
    good = orders_of(pair)[0]
    for prompt in ((), (pair.target.vocabulary,)):
        with pytest.raises(PromptError):
            write(pair, [good, replace(good, prompt=prompt)], 0.0)


def test_batches_hold_every_prompt_once_and_lengths_that_are_close() -> None:
    lengths = [7, 3, 9, 3, 8, 1, 30, 2, 31, 29, 5]
    found = batches(lengths, 3, seed=1)
    assert sorted(number for batch in found for number in batch) == list(range(11))
    assert {tuple(sorted(lengths[n] for n in batch)) for batch in found} == {
        (1, 2, 3),
        (3, 5, 7),
        (8, 9, 29),
        (30, 31),
    }
    assert found == batches(lengths, 3, seed=1)
    assert found != batches(lengths, 3, seed=2)
