"""The promise: whoever drafts, and whatever shares a pass, a request gets the output of plain
decoding.

Three requests of each pair are decoded plainly; with drafts, without and with a prefix-cache hit;
by a proposer of the caller's own; and in a batch that one of them joins late, whose
log-probabilities must be those of plain decoding. The first request drafts as much as it can. What
the others ask for comes from a table with each two values of different settings. recorded.json has
equal texts of the models in weights/, however they are drafted."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, PromptCache, Proposal, Proposer, Request, generate, load

from .outcomes import Outcome, alone, together
from .pairs import PAIRS, T5, Pairs, model
from .support import quick

SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"type": "string", "pattern": "^[abc]{2,6}$"},
        "ba": {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 3},
    },
    "required": ["ab", "ba"],
    "additionalProperties": False,
}
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "temperature": {str(value): {"temperature": value} for value in (0.0, 0.7, 1.3)},
    "constraint": {
        "none": {},
        "regex": {"regex": "[ab]+c?(12|ab)*"},
        "schema": {"json_schema": SCHEMA},
        "forced tokens": {"regex": "abcabc12: \\{ab\\}"},
        "grammar": {"grammar": 'start: "[" start* "]" | "ab" | "c"'},
        "dead end": {"regex": "[abc]{4,9}Z"},
    },
    "shape": {
        "none": {},
        "penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        "bias": {"logit_bias": dict.fromkeys((3, 4, 5, 9, 14, 26), 6.0)},
        "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
        "exclusion": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    },
    "end": {
        "endless": {"max_tokens": 10},
        "own": {"max_tokens": 12},
        "one token": {"max_tokens": 1},
        "no token": {"max_tokens": 0},
        "stop": {"max_tokens": 12},
        "extra": {"max_tokens": 12},
    },
    "drafts": {str(value): {"num_draft": value} for value in (1, 3, 7, "auto")},
    "proposer": {"own": {}, "auto": {"proposer": "auto"}, "lookup": {"proposer": "ngram"}},
    "prompt": {"short": {}, "longer": {}, "long": {}},
}
"""Setting -> name of a value -> options. Completions with "endless" have no EOS token; those with
"stop" and "extra" end inside of what the model writes without these options."""
BUSY = {
    "constraint": "none",
    "shape": "bias",
    "end": "endless",
    "drafts": "3",
    "proposer": "own",
    "prompt": "longer",
}
"""The settings of a request in which drafts are long, and some of them are accepted."""
Row = dict[str, str]


def covering(count: int) -> list[Row]:
    """Return so many rows of settings, which have each two values of different settings."""
    names = sorted((factor, value) for factor, values in FACTORS.items() for value in values)
    missing = {two for two in itertools.combinations(names, 2) if two[0][0] != two[1][0]}
    dice, rows = random.Random(1), list[Row]()

    def covered(row: Row) -> set[Any]:
        return missing.intersection(itertools.combinations(sorted(row.items()), 2))

    for _ in range(count):
        drawn = [{f: dice.choice([*values]) for f, values in FACTORS.items()} for _ in range(20)]
        rows.append(max(drawn, key=lambda row: len(covered(row))))
        missing -= covered(rows[-1])
    assert not missing, missing
    return rows


ROWS = covering(2 * len(PAIRS))
FAST = {
    *("llama", "gemma3_wrapped", "mamba2", T5, "llama, 2 bits", "llama by fewer tokens"),
    *("llama, own heads", "llama, eagle3", "t5, attending dspark"),
}
"""Pairs of the fast run."""


class Knowing(Proposer):
    """A proposer that knows the completion, but errs at random and is sometimes silent."""

    def __init__(self, completion: Sequence[int], dice: random.Random) -> None:
        self._completion, self._dice = completion, dice

    def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
        [tokens] = committed
        ends = (n for n in range(len(self._completion), -1, -1) if n <= len(tokens))
        done = next(n for n in ends if tokens[len(tokens) - n :] == self._completion[:n])
        if self._dice.random() < 0.2:
            return Proposal.one_hot([[]])
        right = [*self._completion[done : done + limit], 5, 6][:limit]
        return Proposal.one_hot([[token if self._dice.random() < 0.8 else 3 for token in right]])


def request_of(pair: Any, row: Row, number: int, dice: random.Random) -> Request:
    """Make the request of a row. Prompts of one pair begin alike."""
    options: dict[str, Any] = {"seed": dice.randrange(1 << 30), "cost_cache": False, "ngram_min": 1}
    bias: dict[int, float] = {}
    for factor, value in row.items():
        settings = FACTORS[factor][value]
        bias |= settings.get("logit_bias", {})
        options |= settings
    if row["end"] == "endless":
        bias |= dict.fromkeys(pair.eos_token_ids, -math.inf)
    begin = [11, 23, 5, 9, 31, 7, 8, 19, 33, 4] * ["short", "longer", "", "long"].index(
        row["prompt"]
    )
    prompt = [*begin, *(dice.randrange(3, 40) for _ in range(number + (not begin)))]
    request = Request(prompt, Options(**{**options, "logit_bias": bias}), top_logprobs=4)
    if row["end"] not in ("stop", "extra"):
        return request
    free = alone(pair, with_options(request, regular=True))
    if len(free.text) < 3:
        return request
    if row["end"] == "extra":
        return with_options(request, extra_eos_token=dice.choice(free.tokens[1:]))
    at = dice.randrange(len(free.text) - 1)
    return with_options(request, stop=free.text[at : at + 2])


def with_options(request: Request, **options: Any) -> Request:
    return replace(request, options=replace(request.options, **options))


def near(one: Outcome, other: Outcome) -> bool:
    """Return whether the log-probabilities of two completions are equal but for rounding."""
    return all(
        abs(here[token] - there[token]) < 1e-3
        for here, there in zip(one.logprobs, other.logprobs, strict=True)
        for token in here.keys() & there.keys()
    )


@pytest.mark.parametrize("name", quick(PAIRS, *FAST))
def test_the_output_is_that_of_plain_decoding(name: str, pairs: Pairs) -> None:
    at, dice = [*PAIRS].index(name), random.Random(name)
    rows = [{**BUSY, "temperature": [*FACTORS["temperature"]][at % 3]}]
    rows += ROWS[2 * at : 2 * at + 2]
    pair = pairs(name)
    requests = [request_of(pair, row, number, dice) for number, row in enumerate(rows)]
    regular = [with_options(request, regular=True) for request in requests]
    plain = together(pair, regular, batch_size=1)
    expected = [outcome.key for outcome in plain]
    assert all(len(outcome.logprobs) == len(outcome.tokens) for outcome in plain)
    # Prompts begin alike, so that the second one finds cached tokens if caches can be cut.
    cache, own = PromptCache(1 << 24), Knowing(plain[-1].tokens, dice)
    assert alone(pair, requests[-1], proposer=own, cache=cache).key == expected[-1]
    drafted = alone(pair, requests[0], cache=cache)
    assert drafted.key == expected[0] and drafted.result.stats.drafted > 0
    batch = together(pair, [*requests, requests[0]], batch_size=2)
    assert [outcome.key for outcome in batch] == [*expected, expected[0]]
    assert all(map(near, batch, [*plain, plain[0]]))


CACHES = ("llama", "gemma3_wrapped", "mamba2", "qwen3_next", T5)
"""Pairs with each kind of cache."""


@pytest.mark.parametrize("name", [*CACHES, "qwen3, newest 9", "llama, 2 bits"])
def test_dozens_of_rounds_keep_every_cache_right(name: str, pairs: Pairs) -> None:
    """Log-probabilities show at once if a rewind keeps a wrong position."""
    pair = pairs(name)
    bias = dict.fromkeys(pair.eos_token_ids, -math.inf)
    options = Options(max_tokens=48, temperature=0.9, seed=4, logit_bias=bias, num_draft=4)
    request = Request([5, 9, 12, 7, 33, 21, 8], replace(options, cost_cache=False), top_logprobs=64)
    [plain] = together(pair, [with_options(request, regular=True)])
    [drafted] = together(pair, [with_options(request, proposer="draft")])
    assert drafted.key == plain.key and near(drafted, plain)
    stats = drafted.result.stats
    assert 10 < stats.rounds < 48 and 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("name", CACHES)
def test_an_identical_draft_model_is_always_right(name: str, tmp_path: Path) -> None:
    """Whatever lookup has proposed before, and wherever it was wrong."""
    target = model(tmp_path, name)
    pair, words = load(target, target), dict.fromkeys((3, 4, 5, 9, 14, 26), 7.0)
    usual: dict[str, Any] = {
        "temperature": 1.0,
        "max_tokens": 40,
        "num_draft": 3,
        "logit_bias": words,
        "proposer": "auto",
        "ngram_min": 2,
        "cost_cache": False,
    }
    changes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"xtc_probability": 0.5, "xtc_threshold": 0.02},
        {"rule": "block"},
    ]
    found = [generate(pair, [5, 9, 14, 5, 9], Options(**{**usual, **one})) for one in changes]
    for result in found:
        draft = result.stats.by_source.get("draft", result.stats)
        assert 0 < draft.accepted == draft.drafted
    assert any(0 < result.stats.accepted < result.stats.drafted for result in found)


@pytest.mark.parametrize("name", ["llama", "mamba2", T5])
def test_an_identical_draft_model_is_always_right_beside_others(name: str, tmp_path: Path) -> None:
    """Rows join late and leave early, some with plain steps of their own before they draft."""
    target = model(tmp_path, name)
    pair, words = load(target, target), dict.fromkeys((3, 4, 5, 9, 14, 26), 7.0)
    free = words | dict.fromkeys(load(target).eos_token_ids, -math.inf)
    usual = Options(proposer="draft", temperature=1.0, logit_bias=free, cost_cache=False)
    requests = [
        Request([5, 9, 14, 7, 5, 33][:length], replace(usual, max_tokens=tokens, num_draft=drafts))
        for length, tokens, drafts in ((3, 9, 3), (1, 30, 1), (6, 21, 5), (2, 12, 0), (4, 17, 3))
    ]
    found = [outcome.result.stats for outcome in together(pair, requests, usual, batch_size=3)]
    assert all(stats.accepted == stats.drafted for stats in found)
    assert [stats.drafted > 0 for stats in found] == [True, True, True, False, True]


def test_a_draft_model_with_fewer_positions_stops_drafting(tmp_path: Path) -> None:
    target = model(tmp_path / "target", "llama")
    pair = load(target, model(tmp_path / "draft", "llama", max_position_embeddings=12))
    free = dict.fromkeys(pair.eos_token_ids, -math.inf)
    usual = Options(proposer="draft", num_draft=3, max_tokens=20, logit_bias=free, cost_cache=False)
    requests = [
        Request([5, 9, 12, 7] * 4, usual),
        Request([5, 9, 12, 7], usual),
        Request([6], usual),
    ]
    plain = [generate(pair, one.prompt, replace(usual, regular=True)).tokens for one in requests]
    single = [generate(pair, one.prompt, usual) for one in requests]
    beside = [one.result for one in together(pair, requests, usual, batch_size=3)]
    assert [result.tokens for result in (*single, *beside)] == plain * 2
    drafted = [result.stats.drafted for result in single]
    assert drafted[0] == 0 < drafted[1] < drafted[2]
