"""A request that is cancelled during the prefill leaves its chunks in the prefix cache, and the
next request with the same prompt goes on there."""

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mlx_specdec import Options, PromptCache, Request, generate, load, stream_generate, stream_many

from .pairs import model
from .support import Server

CHUNK = 8
"""Prefill chunk in tokens. No other pass of these tests has this many."""
PROMPT = [(7 * place) % 50 + 3 for place in range(70)]
OPTIONS = Options(
    max_tokens=6, prefill_step_size=CHUNK, regular=True, temperature=0.7, seed=5, cost_cache=False
)
SHORT = Request([5, 9, 12], Options(max_tokens=50, regular=True, cost_cache=False), ignore_eos=True)
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_closing_a_stream_keeps_the_chunks_of_its_prompts(family: str, tmp_path: Path) -> None:
    """A short prompt is decoded while a long one is prefilled."""
    pair, cache, chunks = load(model(tmp_path, family)), PromptCache(1 << 24), list[int]()
    network = import_module(f"mlx_lm.models.{family}").Model
    shipped = network.__call__

    def passes(module: Any, tokens: Any, *arguments: Any, **named: Any) -> Any:
        if tokens.shape == (1, CHUNK):
            chunks.append(CHUNK)
        return shipped(module, tokens, *arguments, **named)

    with patch.object(network, "__call__", passes):
        stream = iter(stream_many(pair, [SHORT, Request(PROMPT, OPTIONS)], OPTIONS, cache=cache))
        while len(chunks) < 3:
            assert next(stream).number == 0
        stream.close()
    result = stream_generate(pair, PROMPT, OPTIONS, cache=cache).result()
    assert result.labels.cached_tokens == sum(chunks) < len(PROMPT) - 1
    assert result.tokens == generate(pair, PROMPT, OPTIONS).tokens


def cached_tokens(server: Server, body: dict[str, Any]) -> int:
    usage = server.ok(COMPLETIONS, **body)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])
