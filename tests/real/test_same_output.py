"""Published models write the greedy output of plain decoding with drafts, batches and a prompt
cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.margins import compare
from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.checkpoints.source import as_directory
from mlx_specdec.engine.generate import generate, generate_many, stream_generate
from mlx_specdec.engine.loading import load, with_draft_model
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.options import Options
from mlx_specdec.serve.engine import Engine
from mlx_specdec.training.draft import shaped

from ..support.serving import CHAT, client_of, ok, user
from .conftest import file_of, only

PLAIN = Options(max_tokens=16, regular=True, cost_cache=False)
LOOKUP = replace(PLAIN, regular=False, proposer="ngram", num_draft=3)
DRAFT = replace(LOOKUP, proposer="draft", num_draft=2)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = [
    "Repeat this: red, green, blue, red, green, blue, red, green, blue.",
    "Rename a to x:\ndef f(a, b):\n    c = a + b\n    return c * a\n",
    "Write a short poem about the sea.",
    "List the days of the week.",
]
Outputs = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Outputs:
    return one_by_one(pair, PLAIN)


def one_by_one(pair: Pair, options: Options) -> Outputs:
    return [generate(pair, prompt, options).tokens for prompt in PROMPTS]


def at_once(pair: Pair, options: Options) -> Outputs:
    """Return the outputs of a batch of 8, in which every prompt occurs twice."""
    results = generate_many(pair, PROMPTS * 2, options, batch_size=2 * len(PROMPTS))
    return [result.tokens for result in results]


def with_layers(pair: Pair, name: str, layers: int) -> Pair:
    """Return the pair with a draft model of some of the target's layers, which nobody trained."""
    with as_directory(file_of(name)) as directory:
        config = read_config(directory)
    return replace(pair, draft=shaped(pair.target, config, layers)[0], draft_name="layers")


def test_lookup_gives_the_same_output(pair: Pair, plain: Outputs):
    results = [generate(pair, prompt, LOOKUP) for prompt in PROMPTS]
    assert [result.tokens for result in results] == plain
    assert sum(result.stats.accepted for result in results) >= 5


def test_automatic_drafts_give_the_same_output(pair: Pair, plain: Outputs):
    assert one_by_one(pair, replace(LOOKUP, proposer="auto", num_draft="auto")) == plain


@pytest.mark.parametrize("options", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_a_batch_of_8_gives_the_same_output(pair: Pair, plain: Outputs, options: Options):
    assert at_once(pair, options) == plain * 2


@only("smollm2")
@pytest.mark.parametrize("layers", [10, 29])
def test_some_layers_as_draft_give_the_same_output(pair: Pair, plain: Outputs, layers: int):
    assert one_by_one(with_layers(pair, "smollm2", layers), DRAFT) == plain


@only("gemma3")
def test_some_layers_of_a_model_with_windows_give_the_same_output(pair: Pair, plain: Outputs):
    assert one_by_one(with_layers(pair, "gemma3", 6), DRAFT) == plain


@only("smollm2")
def test_a_draft_for_a_batch_of_8_gives_the_same_output(pair: Pair, plain: Outputs):
    assert at_once(with_layers(pair, "smollm2", 29), DRAFT) == plain * 2


@only("qwen-coder")
def test_a_draft_with_another_vocabulary_gives_the_same_output(pair: Pair, plain: Outputs):
    how = {"dtype": "float32", "expand_weights": True}
    both = with_draft_model(pair, file_of("smollm2"), draft_vocab="intersect", **how)
    results = [generate(both, prompt, DRAFT) for prompt in PROMPTS]
    assert [result.tokens for result in results] == plain
    assert sum(result.stats.accepted for result in results) >= 5


@only("smollm2", "qwen-coder")
@pytest.mark.parametrize("options", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_the_prompt_cache_gives_the_same_output(pair: Pair, plain: Outputs, options: Options):
    cache = PromptCache(1 << 28)
    for _ in range(2):
        runs = [stream_generate(pair, prompt, options, cache=cache).result() for prompt in PROMPTS]
        assert [run.tokens for run in runs] == plain
    assert all(run.labels.cached_tokens > 0 for run in runs)


@only("smollm2")
@pytest.mark.parametrize("bits, most", [(8, 0.2), (4, 2.0)])
def test_outputs_with_a_quantized_cache_differ_at_small_margins_only(
    model: Path, bits: int, most: float
):
    caches = CacheSettings(bits=bits)
    pair = load(model, dtype="float32", expand_weights=True, caches=caches)
    assert any("which amplifies rounding" in note for note in pair.notes)
    for prompt in PROMPTS:
        plain, drafted = (generate(pair, prompt, how).tokens for how in (PLAIN, LOOKUP))
        if plain != drafted:
            margin = compare(pair, PLAIN, prompt, plain, drafted).margin
            assert margin is not None and margin < most


@only("smollm2", "qwen-coder")
def test_a_schema_gives_the_same_output(pair: Pair):
    shaped = replace(PLAIN, json_schema=SCHEMA)
    plain = one_by_one(pair, shaped)
    assert all(pair.tokenizer.decode(tokens).startswith("{") for tokens in plain)
    drafted = replace(shaped, regular=False, proposer="ngram", num_draft=3)
    assert one_by_one(pair, drafted) == plain
    assert at_once(pair, shaped) == at_once(pair, drafted) == plain * 2


@only("qwen-coder")
def test_a_tool_is_called_with_the_same_arguments(pair: Pair):
    calls = [called(pair, replace(options, max_tokens=48)) for options in (PLAIN, LOOKUP)]
    assert calls[0] == calls[1] and calls[0]["name"] == "get_weather"


def called(pair: Pair, options: Options) -> dict[str, Any]:
    """Return the call that a server answers a question with."""
    city = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Paris"]}}}
    tool = {"name": "get_weather", "parameters": {**city, "required": ["city"]}}
    engine = Engine(lambda: (pair, options), batch_size=1, waiting=2)
    engine.start()
    try:
        assert engine.ready.wait(60)
        answer = ok(
            client_of(engine),
            CHAT,
            messages=[user("What is the weather in Bonn?")],
            tools=[{"type": "function", "function": tool}],
            tool_choice="required",
        )
    finally:
        engine.close()
        assert engine.join(60)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    return call["function"]
