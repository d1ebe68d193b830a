"""Presence and frequency penalties count the completion; the repetition penalty counts the prompt
too."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specdec import (
    Options,
    PromptCache,
    Request,
    generate,
    generate_many,
    load,
    stream_generate,
    stream_many,
)

from .support import ROOT, checkpoint, moved

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
COUNTED = Options(
    max_tokens=14, presence_penalty=2.5, frequency_penalty=1.5, num_draft=3, cost_cache=False
)
REPEATED = Options(max_tokens=14, repetition_penalty=1e6, num_draft=3, cost_cache=False)
LETTERS = (
    "return open(path).read().split('n') def read_lines abcdefghijklmnopqrstuvwxyz;:!?-_0123456"
)
PROMPTS = ["def read_lines(path):", LETTERS, "naïve café naïve café naïve"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("penalties")
    moved(checkpoint(home / "target", template=TEMPLATE), home / "draft")
    return home


@pytest.fixture(scope="module")
def pair(home: Path) -> Any:
    return load(home / "target", home / "draft")


def laws(
    pair: Any, prompts: Sequence[list[int]], options: Options
) -> list[tuple[list[int], np.ndarray[Any, Any]]]:
    """Return the tokens of each completion and the log-probabilities of all tokens before
    penalties, (tokens, vocabulary)."""
    requests = [Request(prompt, options, top_logprobs=pair.vocabulary) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    rows: list[list[Any]] = [[] for _ in prompts]
    for part in stream_many(pair, requests, options, batch_size=len(prompts)):
        assert part.error is None
        tokens[part.number] += part.tokens
        for entry in part.logprobs:
            row = np.full(pair.vocabulary, -np.inf)
            row[[id for id, _ in entry.top]] = [logprob for _, logprob in entry.top]
            rows[part.number].append(row)
    return [(ids, np.array(row)) for ids, row in zip(tokens, rows, strict=True)]


@pytest.fixture(scope="module")
def prompts(pair: Any) -> list[list[int]]:
    return [pair.tokenizer.encode(prompt) for prompt in PROMPTS]


def test_presence_and_frequency_count_the_completion(pair: Any, prompts: list[list[int]]) -> None:
    found = laws(pair, prompts, COUNTED)
    changed = 0
    for tokens, rows in found:
        seen: Counter[int] = Counter()
        for token, row in zip(tokens, rows, strict=True):
            counts = np.array([seen[id] for id in range(pair.vocabulary)])
            penalized = row - 2.5 * (counts > 0) - 1.5 * counts
            assert token == penalized.argmax()
            changed += penalized.argmax() != row.argmax()
            seen[token] += 1
    assert changed > 0


def test_repetition_counts_prompt_and_completion(pair: Any, prompts: list[list[int]]) -> None:
    """With a bias that makes all logits positive, this penalty leaves no penalized token."""
    options = replace(REPEATED, logit_bias=dict.fromkeys(range(pair.vocabulary), 100.0))
    for prompt, (tokens, rows) in zip(prompts, laws(pair, prompts, options), strict=True):
        seen = list(prompt)
        for token, row in zip(tokens, rows, strict=True):
            row[seen] = -np.inf
            assert token == row.argmax()
            seen.append(token)


@pytest.mark.parametrize("settings", [COUNTED, REPEATED, replace(COUNTED, temperature=0.8, seed=3)])
def test_drafts_batches_and_cached_prompts_equal_plain_decoding(
    pair: Any, prompts: list[list[int]], settings: Options
) -> None:
    drafted, cache = replace(settings, proposer="draft"), PromptCache(max_bytes=1 << 24)
    plain = [generate(pair, prompt, replace(settings, regular=True)).tokens for prompt in prompts]
    assert [generate(pair, prompts[0], drafted).tokens] == plain[:1]
    together = generate_many(pair, prompts, drafted, batch_size=3)
    assert [result.tokens for result in together] == plain
    for cached in (False, True):
        result = stream_generate(pair, prompts[1], drafted, cache=cache).result()
        assert (result.tokens, result.labels.cached_tokens > 0) == (plain[1], cached)


@pytest.mark.parametrize(
    "model, temperature", [("target", 0), ("target", 1), (ROOT / "weights/t5-enfr", 1)]
)
def test_a_draft_is_penalized_like_the_target(home: Path, model: Path, temperature: float) -> None:
    """The target as its own draft model drafts the completion."""
    alike = load(home / model, home / model)
    options = replace(COUNTED, temperature=temperature, max_tokens=9, repetition_penalty=1.2)
    stats = generate(alike, "translate English to French: Where is the station?", options).stats
    assert stats.accepted == stats.drafted > 0


def first_token_is_in(pair: Any) -> str:
    """Return a text whose greedy next token it contains already."""
    for shift in range(60):
        prompt = LETTERS[shift:] + LETTERS[:shift]
        [token] = generate(pair, prompt, Options(max_tokens=1)).tokens
        if token in pair.tokenizer.encode(prompt) and pair.tokenizer.decode([token]).strip():
            return prompt
    raise AssertionError("no text continues with one of its tokens")


@pytest.fixture(scope="module")
def prompt(pair: Any) -> str:
    return first_token_is_in(pair)


def test_the_first_token_of_a_completion_is_not_penalized(pair: Any, prompt: str) -> None:
    for options in (Options(max_tokens=1), Options(max_tokens=1, temperature=1.0, seed=5)):
        free = generate(pair, prompt, options).tokens
        for name in ("presence_penalty", "frequency_penalty"):
            assert generate(pair, prompt, replace(options, **{name: 50.0})).tokens == free
    free = generate(pair, prompt, Options(max_tokens=1)).tokens
    assert generate(pair, prompt, Options(max_tokens=1, repetition_penalty=50.0)).tokens != free
