"""Published models write the greedy output of plain decoding with drafts, batches and a prompt
cache."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import (
    CacheSettings,
    Options,
    PromptCache,
    Request,
    convert,
    generate,
    generate_many,
    load,
    stream_generate,
    stream_many,
)

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
def plain(pair: Any) -> Outputs:
    return one_by_one(pair, PLAIN)


def one_by_one(pair: Any, options: Options) -> Outputs:
    return [generate(pair, prompt, options).tokens for prompt in PROMPTS]


def at_once(pair: Any, options: Options) -> Outputs:
    """Return the outputs of a batch of 8, in which every prompt occurs twice."""
    results = generate_many(pair, PROMPTS * 2, options, batch_size=2 * len(PROMPTS))
    return [result.tokens for result in results]


FLOAT: dict[str, Any] = {"dtype": "float32", "expand_weights": True}


def with_layers(name: str, layers: int, directory: Path) -> Any:
    """Return a pair with a draft model of some of the target's layers, which nobody trained."""
    convert(str(file_of(name)), directory / "draft")
    file = directory / "draft" / "config.json"
    config = json.loads(file.read_text())
    count = config["num_hidden_layers"]
    kept = {str(number * count // layers): str(number) for number in range(layers)}
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][int(number)] for number in kept]
    file.write_text(json.dumps(config))
    for part in (directory / "draft").glob("*.safetensors"):
        renamed = {}
        for tensor, array in mx.load(str(part)).items():
            found = re.search(r"layers\.(\d+)\.", tensor)
            if found is None:
                renamed[tensor] = array
            elif found[1] in kept:
                renamed[tensor.replace(found[0], f"layers.{kept[found[1]]}.")] = array
        mx.eval(renamed)
        mx.save_safetensors(str(part), renamed, {"format": "mlx"})
    (directory / "draft" / "model.safetensors.index.json").unlink(missing_ok=True)
    return load(file_of(name), directory / "draft", **FLOAT)


def test_lookup_gives_the_same_output(pair: Any, plain: Outputs):
    results = [generate(pair, prompt, LOOKUP) for prompt in PROMPTS]
    assert [result.tokens for result in results] == plain
    assert sum(result.stats.accepted for result in results) >= 5


def test_automatic_drafts_give_the_same_output(pair: Any, plain: Outputs):
    assert one_by_one(pair, replace(LOOKUP, proposer="auto", num_draft="auto")) == plain


@pytest.mark.parametrize("options", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_a_batch_of_8_gives_the_same_output(pair: Any, plain: Outputs, options: Options):
    assert at_once(pair, options) == plain * 2


@only("smollm2")
@pytest.mark.parametrize("layers", [10, 29])
def test_some_layers_as_draft_give_the_same_output(plain: Outputs, layers: int, tmp_path: Path):
    assert one_by_one(with_layers("smollm2", layers, tmp_path), DRAFT) == plain


@only("qwen-coder")
def test_a_draft_with_another_vocabulary_gives_the_same_output(plain: Outputs):
    both = load(file_of("qwen-coder"), file_of("smollm2"), draft_vocab="intersect", **FLOAT)
    results = [generate(both, prompt, DRAFT) for prompt in PROMPTS]
    assert [result.tokens for result in results] == plain
    assert sum(result.stats.accepted for result in results) >= 5


@only("smollm2", "qwen-coder")
@pytest.mark.parametrize("options", [PLAIN, LOOKUP], ids=["plain", "lookup"])
def test_the_prompt_cache_gives_the_same_output(pair: Any, plain: Outputs, options: Options):
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
    pair = load(model, caches=caches, **FLOAT)
    assert any("which amplifies rounding" in note for note in pair.notes)
    for prompt in PROMPTS:
        plain, drafted = (generate(pair, prompt, how).tokens for how in (PLAIN, LOOKUP))
        if plain != drafted:
            at = next(at for at, token in enumerate(plain) if drafted[at] != token)
            request = Request(prompt, PLAIN, top_logprobs=2)
            entries = [e for step in stream_many(pair, [request]) for e in step.logprobs]
            (_, best), (_, second) = entries[at].top
            assert best - second < most


@only("smollm2", "qwen-coder")
def test_a_schema_gives_the_same_output(pair: Any):
    shaped = replace(PLAIN, json_schema=SCHEMA)
    plain = one_by_one(pair, shaped)
    assert all(pair.tokenizer.decode(tokens).startswith("{") for tokens in plain)
    drafted = replace(shaped, regular=False, proposer="ngram", num_draft=3)
    assert one_by_one(pair, drafted) == plain
    assert at_once(pair, shaped) == at_once(pair, drafted) == plain * 2
