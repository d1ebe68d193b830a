"""How a completion ends: EOS tokens, stop strings and limits, wherever they are inside of drafts.
The expected output is cut out of a longer completion, without the code that ends it."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import (
    DecodingError,
    Options,
    Proposal,
    Proposer,
    Request,
    generate,
    load,
    stream_many,
)

from .outcomes import Outcome, alone, together
from .pairs import END, SIZE, T5, Pairs, model
from .support import moved

PROMPT = [5, 9, 12, 7, 33, 21, 8]
ENDLESS = {END: -math.inf}
LENGTH, DRAFTS, DAMAGED = 24, 5, 40
BANNED = {**ENDLESS, DAMAGED: -math.inf}


@pytest.fixture(scope="module", params=["llama", T5])
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Any:
    return pairs(request.param)


def request_of(**options: Any) -> Request:
    usual: dict[str, Any] = {
        "max_tokens": LENGTH,
        "temperature": 1.0,
        "seed": 7,
        "num_draft": DRAFTS,
        "logit_bias": ENDLESS,
        "proposer": "draft",
        "cost_cache": False,
    }
    return Request(PROMPT, Options(**{**usual, **options}), top_logprobs=2)


@pytest.fixture(scope="module")
def free(pair: Any) -> Outcome:
    """A completion that nothing but its length ends."""
    outcome = alone(pair, request_of(regular=True))
    assert (len(outcome.tokens), outcome.reason) == (LENGTH, "length")
    return outcome


class Right(Proposer):
    """A proposer that drafts the completion itself, and wrong tokens after it."""

    def __init__(self, completion: Sequence[int], after: int = 3) -> None:
        self._completion, self._after, self._start = completion, after, -1

    def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
        [tokens] = committed
        self._start = len(tokens) if self._start < 0 else self._start
        drafts = [*self._completion[len(tokens) - self._start :], *[self._after] * limit]
        return Proposal.one_hot([drafts[:limit]])


def ends_as(pair: Any, free: Outcome, changes: list[dict[str, Any]], keys: list[Any]) -> None:
    """Check completions with changed options: with right drafts, plainly, and in one batch."""
    requests = [request_of(**change) for change in changes]
    for request, key in zip(requests, keys, strict=True):
        assert alone(pair, request, proposer=Right(free.tokens)).key == key
    plain = [request_of(**change, regular=True) for change in changes]
    for batch in (requests, plain):
        outcomes = together(pair, batch, batch_size=len(batch))
        assert [outcome.key for outcome in outcomes] == keys
        assert all(len(outcome.logprobs) == len(outcome.tokens) for outcome in outcomes)


def test_an_eos_token_ends_a_completion_wherever_it_comes(pair: Any, free: Outcome) -> None:
    changes, keys = [], []
    for token in dict.fromkeys(free.tokens[:12]):
        end = free.tokens.index(token)
        changes.append({"extra_eos_token": token})
        text = pair.tokenizer.decode(free.tokens[:end])
        keys.append((tuple(free.tokens[: end + 1]), text, "eos"))
    ends_as(pair, free, changes, keys)


def test_max_tokens_is_reached_and_never_exceeded(pair: Any, free: Outcome) -> None:
    lengths = (0, 1, 2, DRAFTS, DRAFTS + 1, DRAFTS + 2, 13)
    keys = [
        (tuple(free.tokens[:n]), pair.tokenizer.decode(free.tokens[:n]), "length") for n in lengths
    ]
    ends_as(pair, free, [{"max_tokens": n} for n in lengths], keys)


def test_a_stop_string_ends_a_completion_wherever_it_begins(pair: Any, free: Outcome) -> None:
    """Strings of one to four characters, which begin and end inside of tokens and of drafts. Bytes
    that are no character are held back, so that no stop string has them."""
    changes, keys = [], []
    texts = [pair.tokenizer.decode(free.tokens[:n]) for n in range(LENGTH + 1)]
    for at in range(len(free.text) - 4):
        stop = free.text[at : at + 1 + at % 4]
        if "\ufffd" in stop:
            continue
        count = next(n for n, text in enumerate(texts) if stop in text)
        changes.append({"stop": ("never", stop)})
        keys.append((tuple(free.tokens[:count]), texts[count].partition(stop)[0], "stop"))
    ends_as(pair, free, changes, keys)


def test_statistics_stop_at_the_last_token(pair: Any, free: Outcome) -> None:
    """Right drafts go on after the EOS token, where nothing counts."""
    for token in dict.fromkeys(free.tokens[:9]):
        outcome = alone(pair, request_of(extra_eos_token=token), proposer=Right(free.tokens))
        end, stats = len(outcome.tokens), outcome.result.stats
        assert stats.rounds == -(-end // (DRAFTS + 1))
        assert stats.drafted == stats.accepted == end - end // (DRAFTS + 1)
        assert stats.acceptance_rate in (None, 1.0)


def test_log_probabilities_are_distributions(pair: Any, free: Outcome) -> None:
    request = replace(request_of(max_tokens=6), top_logprobs=SIZE)
    for row in together(pair, [request])[0].logprobs:
        assert len(row) == SIZE and sum(map(math.exp, row.values())) == pytest.approx(1, abs=1e-4)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pair whose models give NaN after one token."""
    home = tmp_path_factory.mktemp("damaged")
    draft = moved(model(home / "target", "llama"), home / "draft")
    for directory in (home / "target", draft):
        weights: Any = mx.load(str(directory / "model.safetensors"))
        weights["model.embed_tokens.weight"][DAMAGED] = math.nan
        mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return load(home / "target", draft)


def test_log_probabilities_of_a_prompt_are_those_of_its_completion(damaged: Any) -> None:
    options = Options(max_tokens=6, logit_bias=BANNED)
    [outcome] = together(damaged, [Request(PROMPT, options, top_logprobs=1)])
    longer = Request([*PROMPT, *outcome.tokens], options, top_logprobs=1, scores_prompt=True)
    first = next(step for step in stream_many(damaged, [longer]) if step.prompt_logprobs)
    scored = [entry.logprob for entry in first.prompt_logprobs[-6:]]
    found = [row[token] for row, token in zip(outcome.logprobs, outcome.tokens, strict=True)]
    assert scored == pytest.approx(found, abs=1e-4)


@pytest.mark.parametrize("rule", ["coupled", "token", "block", "typical"])
@pytest.mark.parametrize("num_draft", [0, 3])
def test_damaged_logits_end_their_own_completion_alone(
    damaged: Any, rule: str, num_draft: int
) -> None:
    options = {"rule": rule, "num_draft": num_draft, "logit_bias": BANNED, "max_tokens": 8}
    requests = [request_of(**options, seed=seed) for seed in range(3)]
    expected = [alone(damaged, request).tokens for request in requests]
    broken = replace(requests[0], prompt=[*PROMPT, DAMAGED])
    found = together(damaged, [requests[0], broken, *requests[1:]], batch_size=4)
    assert "NaN or infinite" in str(found[1].error)
    # By other rules, a completion depends on the drafts before its end, which the batch knows not.
    same = 8 if rule == "coupled" or not num_draft else 8 - num_draft
    good = [outcome.tokens[:same] for outcome in (found[0], *found[2:])]
    assert good == [tokens[:same] for tokens in expected]
    with pytest.raises(DecodingError, match="NaN or infinite"):
        generate(damaged, broken.prompt, broken.options)


def test_extreme_settings_mean_their_limits(pair: Any) -> None:
    """A result is strict JSON, whatever the settings are."""
    others = dict.fromkeys({*range(SIZE)} - {9}, -math.inf)
    greedy = generate(pair, PROMPT, Options(max_tokens=8)).tokens
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"temperature": 1e-30}, greedy),
        ({"temperature": 1.0, "logit_bias": {7: 1e20}}, (7,) * 8),
        ({"temperature": 1.0, "logit_bias": others}, (9,) * 8),
        ({"temperature": 1e30, "max_tokens": 0}, ()),
    ]
    for filters in ({}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"rule": "token"}):
        for changes, tokens in cases:
            result = generate(pair, PROMPT, Options(**{"max_tokens": 8, **filters, **changes}))
            assert result.tokens == tokens
            json.dumps(result.as_dict(), allow_nan=False)


def test_a_text_ends_where_the_positions_of_the_model_end(tmp_path: Path) -> None:
    """So does a draft, which may have fewer positions."""
    target = model(tmp_path / "target", "llama", max_position_embeddings=len(PROMPT) + 9)
    draft = model(tmp_path / "draft", "llama", max_position_embeddings=len(PROMPT) + 4)
    for pair in (load(target), load(target, draft)):
        result = generate(pair, PROMPT, Options(max_tokens=50, num_draft=4, logit_bias=ENDLESS))
        assert (len(result.tokens), result.finish_reason) == (9, "length")
