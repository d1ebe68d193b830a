"""SmolLM2 writes the greedy output of plain decoding with drafts, batches and a prompt cache."""

from dataclasses import replace

import pytest

from mlx_specdec.engine.generate import generate, generate_many, stream_generate
from mlx_specdec.engine.loading import with_draft_model
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.options import Options

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


def test_lookup_gives_the_same_output(pair: Pair, plain: Outputs):
    results = [generate(pair, prompt, LOOKUP) for prompt in PROMPTS]
    assert [result.tokens for result in results] == plain
    assert sum(result.stats.accepted for result in results) >= 10


def test_automatic_drafts_give_the_same_output(pair: Pair, plain: Outputs):
    assert one_by_one(pair, replace(LOOKUP, proposer="auto", num_draft="auto")) == plain


@pytest.mark.parametrize("draft", ["self", "self:10", "self:29"])
def test_own_layers_as_draft_give_the_same_output(pair: Pair, plain: Outputs, draft: str):
    assert one_by_one(with_draft_model(pair, draft), DRAFT) == plain


def test_a_draft_for_a_batch_of_8_gives_the_same_output(pair: Pair, plain: Outputs):
    assert at_once(with_draft_model(pair, "self:29"), DRAFT) == plain * 2


@pytest.mark.parametrize("options", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_a_batch_of_8_gives_the_same_output(pair: Pair, plain: Outputs, options: Options):
    assert at_once(pair, options) == plain * 2


@pytest.mark.parametrize("options", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_the_prompt_cache_gives_the_same_output(pair: Pair, plain: Outputs, options: Options):
    cache = PromptCache(1 << 28)
    for _ in range(2):
        runs = [stream_generate(pair, prompt, options, cache=cache).result() for prompt in PROMPTS]
        assert [run.tokens for run in runs] == plain
    assert all(run.labels.cached_tokens > 0 for run in runs)


def test_a_schema_gives_the_same_output(pair: Pair):
    shaped = replace(PLAIN, json_schema=SCHEMA)
    plain = one_by_one(pair, shaped)
    assert all(pair.tokenizer.decode(tokens).startswith("{") for tokens in plain)
    assert one_by_one(pair, replace(shaped, regular=False, proposer="ngram", num_draft=3)) == plain
    assert at_once(pair, shaped) == plain * 2
