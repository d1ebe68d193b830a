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
from mlx_specdec.training import batch_generate as module
from mlx_specdec.training.batch_generate import Request, batch_generate, batches

from .. import tiny
from ..cli.conftest import make_llama, make_t5

TEXTS = ["some words", "other words than these and more of them", "a", "words again and again"]


@pytest.fixture(scope="module", params=["llama", "t5"])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    make = make_llama if request.param == "llama" else make_t5
    return assemble.load(make(tmp_path_factory.mktemp(request.param)))


def requests_of(pair: Pair) -> list[Request]:
    """Prompts, rooms and seeds that all differ."""
    prompts = [tuple(pair.tokenizer.encode(text)) for text in TEXTS]
    return [Request(prompt, 12 + 5 * at, at) for at, prompt in enumerate(prompts)]


def plain(pair: Pair, request: Request, temperature: float) -> tuple[int, ...]:
    asked = Options(
        max_tokens=request.max_tokens, regular=True, temperature=temperature, seed=request.seed
    )
    return generate(pair, request.prompt, asked).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_text_is_what_plain_decoding_writes(pair: Pair, temperature: float) -> None:
    requests = requests_of(pair)
    assert len({len(request.prompt) for request in requests}) == len(requests)
    expected = [plain(pair, request, temperature) for request in requests]
    assert batch_generate(pair, requests, temperature) == expected
    assert batch_generate(pair, requests[2:3], temperature) == expected[2:3]


def test_a_text_ends_behind_its_own_end_token(pair: Pair) -> None:
    requests = requests_of(pair)
    free = batch_generate(replace(pair, eos_token_ids=frozenset()), requests, 1.0)
    end = max(free, key=len)[1]
    ending = replace(pair, eos_token_ids=frozenset({end}))
    completions = batch_generate(ending, requests, 1.0)
    assert any(text[-1] == end for text in completions)
    for text, longer in zip(completions, free, strict=True):
        cut = longer[: longer.index(end) + 1] if end in longer else longer
        assert text == cut


def test_long_prompts_are_seen_in_several_passes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(pair)
    longer = [replace(request, prompt=request.prompt * 4) for request in requests]
    expected = batch_generate(pair, longer, 0.0)
    monkeypatch.setattr(module, "TOKENS_A_PASS", 8)
    assert batch_generate(pair, longer, 0.0) == expected


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
    good = requests_of(pair)[0]
    for prompt in ((), (pair.target.vocabulary,)):
        with pytest.raises(PromptError):
            batch_generate(pair, [good, replace(good, prompt=prompt)], 0.0)


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
