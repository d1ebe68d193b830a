"""Pairs of tiny models that are made once, and a tokenizer of numbers for them."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.generate import generate, generate_many, stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.models.base import Base
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.results import Result
from mlx_specdec.text.tokenizer import Tokenizer
from mlx_specdec.types import Context, Model, feed

from . import tiny
from .families import config_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5"
BART = FIXTURES.parent / "bart"
SIZE = 64
PROMPT = [5, 9, 12, 7, 33, 21, 8]


class Numbers(Tokenizer):
    """Token i is the text "i "; enough of a tokenizer for texts that nobody reads."""

    size, digest, ids = SIZE, "numbers", {str(id): id for id in range(SIZE)}

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids) -> str:
        return "".join(f"{id} " for id in ids)


def perturbed(network, amount: float):
    """Weights moved a little: a draft that is often, but not always, right."""
    keys = iter(mx.random.split(mx.random.key(5), 2000))

    def move(array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating) or array.ndim < 2:
            return array
        return array * (1 + amount * mx.random.normal(array.shape, key=next(keys)))

    network.update(tree_map(move, network.parameters()))
    return network


def pair_of(target: Model, draft: Model | None, eos: frozenset[int] = frozenset()) -> Pair:
    size = min(SIZE, target.vocabulary)
    return Pair("target", "draft", target, draft, Numbers(), eos, size, "float32", 0.0)


# Made once: nobody changes their weights.
@functools.cache
def decoder(name: str, moved: float = 0.0) -> DecoderOnlyModel:
    network = tiny.build(name)
    return DecoderOnlyModel(perturbed(network, moved) if moved else network)


@functools.cache
def translator(kind: str, moved: float = 0.0) -> EncoderDecoderModel:
    directory = BART / kind if (BART / kind).exists() else FIXTURES / kind
    model = load_model(directory, dtype="float32").model
    assert isinstance(model, EncoderDecoderModel)
    if moved:
        perturbed(model.network, moved)
    return model


def model_of(name: str, dtype: mx.Dtype = mx.float32, **changes: object) -> DecoderOnlyModel:
    """A tiny model of any family of mlx-lm."""
    network = tiny.from_config({**config_of(name), **changes})
    network.set_dtype(dtype)
    return DecoderOnlyModel(network)


def decoder_only(name: str, amount: float = 0.3) -> Pair:
    return pair_of(decoder(name), decoder(name, amount))


def encoder_decoder(kind: str, amount: float = 0.3) -> Pair:
    return pair_of(translator(kind), translator(kind, amount))


def model_for(name: str) -> Base:
    translates = any((place / name).exists() for place in (FIXTURES, BART))
    return translator(name) if translates else decoder(name)


def pair_for(name: str) -> Pair:
    return encoder_decoder(name, 0.1) if (FIXTURES / name).exists() else decoder_only(name)


ROOM = 1 << 24
SYSTEM = [11, 40, 23, 5, 9, 31, 7, 8, 60, 2, 19, 33]


def run(pair: Pair, prompt: Sequence[int], options: Options, cache: PromptCache) -> Result:
    return stream_generate(pair, list(prompt), options, cache=cache).result()


def read(model: Model, prompt: Sequence[int]) -> Context:
    """A context that has seen all of the prefix but its last token."""
    context = model.open_batch([prompt])
    if left := model.prefix(prompt)[:-1]:
        feed(context, [left])
    context.evaluate()
    return context


def drafts_change_no_text(pair: Pair, requests: Sequence[Request]) -> None:
    """Check the texts of requests with drafts, alone and in one batch, against plain decoding. Some
    of the drafts must be refused."""
    plain = [
        generate(pair, request.prompt, replace(request.options, regular=True)).tokens
        for request in requests
    ]
    alone = [generate(pair, request.prompt, request.options) for request in requests]
    assert [result.tokens for result in alone] == plain
    together = list(generate_many(pair, requests, requests[0].options, batch_size=3))
    assert [result.tokens for result in together] == plain
    assert all(result.stats.drafted for result in together)
    assert any(result.stats.drafted > result.stats.accepted > 0 for result in alone)
