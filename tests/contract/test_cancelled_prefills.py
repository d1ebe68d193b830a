"""A request that is cancelled during the prefill leaves its chunks in the prefix cache, and the
next request with the same prompt goes on there."""

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mlx_specdec import Options, PromptCache, Request, generate, load, stream_generate, stream_many

from .pairs import model
from .support import Server, post, served, wait_until

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


STOPPED = """
import pathlib, time
clock, skipped = time.perf_counter, []
time.perf_counter = lambda: clock() + sum(skipped)
import mlx_specdec
import mlx_lm.models.{family} as models

place = pathlib.Path({place!r})
shipped, chunks = models.Model.__call__, []

def passes(module, tokens, *arguments, **named):
    if tokens.shape == (1, {chunk}) and (place / "asked").exists():
        chunks.append({chunk})
        if len(chunks) == 3:
            skipped.append(11)
            (place / "reached").touch()
        while len(chunks) == 3 and not (place / "cancelled").exists():
            time.sleep(0.01)
    return shipped(module, tokens, *arguments, **named)

models.Model.__call__ = passes
"""
"""A program that stops in the third chunk of a prompt until a file exists. Its clock shows eleven
seconds more from then on."""


def cached_tokens(server: Server, body: dict[str, Any]) -> int:
    usage = server.ok(COMPLETIONS, **body)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("family", "restarts"), [("llama", False), ("mamba2", True)], ids=["memory", "disk"]
)
def test_a_request_goes_on_where_a_cancelled_one_ended(
    family: str, restarts: bool, tmp_path: Path
) -> None:
    """A prefill of more than ten seconds is in the log."""
    flags: tuple[object, ...] = ("--model", model(tmp_path / "model", family), "--no-cost-cache")
    flags += ("--prefill-step-size", CHUNK, "--proposer", "none")
    flags += ("--prompt-cache-dir", tmp_path / "cache") if restarts else ()
    body = {"prompt": PROMPT, "max_tokens": 2}
    program = STOPPED.format(family=family, place=str(tmp_path), chunk=CHUNK)
    with served(*flags, program=program) as server:
        (tmp_path / "asked").touch()
        with server.connect(post(COMPLETIONS, {**body, "stream": True})):
            wait_until((tmp_path / "reached").exists)
        wait_until(lambda: server.metrics()["mlx_specdec:requests_cancelled_total"] == 1)
        (tmp_path / "cancelled").touch()
        server.waits_for(f"prefill of a prompt: {3 * CHUNK} of {len(PROMPT)} tokens after 1")
        if not restarts:
            assert cached_tokens(server, body) == 3 * CHUNK
    if restarts:
        with served(*flags) as server:
            assert cached_tokens(server, body) == 3 * CHUNK
