"""Requests that are decoded together: errors of their own, endless prompts, ends from outside,
options of their own, and memory. That outputs are equal is checked in test_same_output.py."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mlx_specdec import (
    DecodingError,
    OptionError,
    Options,
    PromptCache,
    Request,
    generate,
    generate_many,
    stream_generate,
    stream_many,
)

from .outcomes import alone, together
from .pairs import SIZE, T5, Pairs

FREE = Options(
    max_tokens=9,
    temperature=0.8,
    num_draft=2,
    proposer="draft",
    frequency_penalty=1,
    cost_cache=False,
)
LONG = [(7 * place) % 50 + 3 for place in range(700)]


@pytest.fixture(scope="module", params=["llama", T5])
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Any:
    return pairs(request.param)


@pytest.fixture(scope="module")
def llama(pairs: Pairs) -> Any:
    return pairs("llama")


def requests_of(count: int, **options: Any) -> list[Request]:
    """Return requests whose prompts and completions have different lengths."""
    return [
        Request(
            LONG[7 * number : 7 * number + (1, 3, 40, 9, 2, 20)[number % 6]],
            replace(FREE, seed=number, max_tokens=(9, 5, 14)[number % 3], **options),
        )
        for number in range(count)
    ]


def test_an_unusable_request_has_an_error_of_its_own(pair: Any) -> None:
    good, banned = requests_of(1)[0], dict.fromkeys(range(SIZE), -math.inf)
    bad = {
        "the prompt is empty": replace(good, prompt=[]),
        "not among the model's": replace(good, prompt=[SIZE + 5]),
        "bans every token": replace(good, options=replace(FREE, logit_bias=banned)),
        "no token '<|none|>'": replace(good, options=replace(FREE, extra_eos_token="<|none|>")),
    }
    expected = alone(pair, good).key
    for message, request in bad.items():
        outcomes = together(pair, [good, request, good], good.options)
        assert message in str(outcomes[1].error)
        assert [outcomes[0].key, outcomes[2].key] == [expected] * 2
        with pytest.raises(DecodingError, match=f"prompt 1: .*{re.escape(message)}"):
            generate_many(pair, [good, request], good.options)


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        ({}, {"batch_size": 0}, "batch-size must be 1 or more, not 0"),
        ({}, {"batch_size": "4"}, "batch-size must be a whole number, not '4'"),
        ({}, {"batch_size": 1.5}, "batch-size must be a whole number, not 1.5"),
        *[({}, {"memory_budget": wrong}, "memory-budget must be") for wrong in (0, -1, 1.5, "8GB")],
        ({"system_prompt": "be brief"}, {}, "this model has none"),
        ({"chat_template_config": {"a": 1}}, {}, "this model has none"),
        ({"chat_template_config": {"tokenize": False}}, {}, "may not set tokenize"),
        ({"extra_eos_token": "<|none|>"}, {}, "the model has no token '<|none|>'"),
        ({"logit_bias": {10**6: 1.0}}, {}, "there is no token 1000000"),
        ({"proposer": "medusa"}, {}, "no Medusa heads"),
        ({"proposer": "mtp"}, {}, "no layers"),
        ({"proposer": "eagle3"}, {}, "no such drafter"),
    ],
)
def test_what_no_prompt_could_have_is_refused_at_once(
    llama: Any, changes: dict[str, Any], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        stream_many(llama, iter(()), Options(**changes), **how)


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_prompts_may_be_endless(llama: Any, batch_size: Any) -> None:
    """They are taken as rows become free, and completions come while there are more."""
    requests, taken = requests_of(5), itertools.count()
    found: dict[int, tuple[int, ...]] = {}

    def endless() -> Iterator[Request]:
        for request in itertools.cycle(requests):
            next(taken)
            yield request

    for step in stream_many(llama, endless(), FREE, batch_size=batch_size):
        assert step.error is None
        if step.result is not None:
            found[step.number] = step.result.tokens
        if len(found) == 12:
            break
    assert next(taken) <= 12 + 16 * (64 if batch_size == "auto" else batch_size)
    expected = [generate(llama, request.prompt, request.options).tokens for request in requests]
    assert all(tokens == expected[number % 5] for number, tokens in found.items())


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_a_request_that_is_given_up_ends_at_once(pair: Any, steps: int) -> None:
    """While it waits, while its prompt is prefilled in chunks, and while it is decoded."""
    requests = requests_of(7, prefill_step_size=7)
    expected = [outcome.key for outcome in together(pair, requests, FREE, batch_size=4)]
    run, given_up = stream_many(pair, requests, FREE, batch_size=4), {0, 2, 6}
    texts: dict[int, tuple[Any, ...]] = {}
    for count, step in enumerate(run):
        if count == steps:
            for number in given_up - {step.number}:
                run.cancel(number)
        assert count <= steps or step.number not in given_up - texts.keys() - {step.number}
        if step.result is not None:
            texts[step.number] = (step.result.tokens, step.result.text, step.result.finish_reason)
    assert texts.keys() >= {1, 3, 4, 5}
    assert all(text == expected[number] for number, text in texts.items())


def test_an_interrupted_completion_is_a_result(pair: Any) -> None:
    run, steps = stream_generate(pair, LONG[:9], replace(FREE, regular=True)), []
    for step in run:
        steps.append(step)
        if len(steps) == 4:
            break
    last = run.interrupt()
    result = run.result()
    assert result.finish_reason == "interrupted"
    assert result.text == "".join(step.text for step in [*steps, last])


def test_requests_of_one_batch_have_options_of_their_own(pair: Any) -> None:
    changes: list[dict[str, Any]] = [
        {"regular": True},
        {"num_draft": 1},
        {},
        {"proposer": "none"},
        {"rule": "token", "num_draft": 0},
    ]
    requests = [
        replace(request, options=replace(request.options, max_tokens=20, **changes[number % 5]))
        for number, request in enumerate(requests_of(10))
    ]
    outcomes = together(pair, requests, FREE, batch_size=10)
    assert [outcome.key for outcome in outcomes] == [
        alone(pair, request).key for request in requests
    ]
    for number, outcome in enumerate(outcomes):
        result, stats = outcome.result, outcome.result.stats
        assert result.labels.seed == number
        assert result.labels.prompt_tokens == len(requests[number].prompt)
        most = (None, 1, 2, None, None)[number % 5]
        if most is None:
            assert result.labels.proposer == "none" and stats.drafted == stats.accepted
        else:
            assert len(stats.drafted_by_position) == most


LOSSY: list[dict[str, Any]] = [
    {"rule": "token"},
    {"rule": "block"},
    {"rule": "typical"},
    {"rule": "typical", "temperature": 0.0},
    {"delta": 0.5},
    {"delta": 1.0, "temperature": 0.0},
]


@pytest.mark.parametrize("settings", LOSSY, ids=str)
def test_under_other_rules_a_batch_changes_nothing_but_the_end(
    pair: Any, settings: dict[str, Any]
) -> None:
    """There, a completion depends on how much was drafted. A row of a batch drafts as much as
    alone, but it does not see its end."""
    free = dict.fromkeys(pair.eos_token_ids, -math.inf)
    requests = [
        replace(
            one,
            options=replace(
                one.options, num_draft=number, max_tokens=16, logit_bias=free, **settings
            ),
        )
        for number, one in enumerate(requests_of(5))
    ]
    expected = [alone(pair, request).tokens for request in requests]
    found = together(pair, requests, replace(FREE, num_draft=4, **settings), batch_size=5)
    assert [one.tokens[:-5] for one in found] == [tokens[:-5] for tokens in expected]
    cache = PromptCache(1 << 24)
    for _ in range(2):
        assert alone(pair, requests[2], cache=cache).tokens == expected[2]


@pytest.mark.parametrize("place", [0, 7])
def test_short_prompts_do_not_wait_for_a_long_one(llama: Any, place: int) -> None:
    options = replace(FREE, max_tokens=4, prefill_step_size=32)
    prompts = [[5, 9, 11, number + 3] for number in range(7)]
    prompts.insert(place, LONG)
    order = [s.number for s in stream_many(llama, prompts, options, batch_size=8) if s.tokens]
    assert order.index(place) == len(order) - order.count(place)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama4", "its caches of type ChunkedKVCache hold one sequence"),
        ("recurrent_gemma", "the recurrent state of an empty sequence is not zero"),
        ("mamba2", None),
        ("qwen3_next", None),
    ],
)
def test_models_that_cannot_share_passes_say_why(
    name: str, reason: str | None, pairs: Pairs
) -> None:
    run = stream_many(pairs(name), requests_of(2), FREE, batch_size=4)
    found = sorted(step.number for step in run if step.result is not None)
    message = f"/target cannot take several sequences in one pass: {reason}"
    assert (found, run.size.size) == ([0, 1], 1 if reason else 4)
    assert reason is None or str(run.why_not).endswith(message)


@pytest.mark.filterwarnings("ignore:the prompt has")
def test_requests_wait_for_memory(llama: Any) -> None:
    """With room for the longest one, some of the others wait, which changes nothing."""
    requests = [
        Request(LONG[: (1, 700, 60, 300)[n % 4]], replace(FREE, seed=n, prefill_step_size=64))
        for n in range(5)
    ]
    expected = [outcome.key for outcome in together(llama, requests, FREE, batch_size=5)]
    found = together(llama, requests, FREE, batch_size=5, memory_budget=8_000_000)
    assert [outcome.key for outcome in found] == expected


def test_what_never_fits_into_memory_is_an_error_with_the_numbers(llama: Any) -> None:
    plain = replace(FREE, regular=True)
    requests = [LONG[:5], LONG[:600], Request(LONG[:5], replace(plain, max_tokens=4000))]
    fits, long, many = together(llama, requests, plain, memory_budget=350_000)
    assert fits.error is None
    assert "the prompt has 600 tokens, which take 5.3 MB of memory" in str(long.error)
    assert "350.0 kB are there for all texts: shorten it" in str(long.error)
    assert re.search(r"ask for at most [\d,]+ tokens, or raise memory-budget", str(many.error))


def test_exact_decodes_one_request_after_another_and_caches_whole_chunks(llama: Any) -> None:
    options, cache = replace(FREE, exact=True), PromptCache(1 << 24)
    requests = [Request(LONG[:length], options) for length in (9, 3, 600)]
    expected = [alone(llama, replace(one, options=FREE)).key for one in requests]
    # What others have cached does not count, nor do completions and the ends of prompts.
    alone(llama, replace(requests[-1], options=FREE), cache=cache)
    for chunk in (0, 512):
        outcomes = [alone(llama, request, cache=cache) for request in requests]
        assert [outcome.key for outcome in outcomes] == expected
        assert [one.result.labels.cached_tokens for one in outcomes] == [0, 0, chunk]
        assert all(one.result.labels.exact for one in outcomes)
    longer = alone(llama, Request([*LONG[:590], 7, 8, 9], options), cache=cache)
    assert longer.result.labels.cached_tokens == 512
    run = stream_many(llama, requests, options, batch_size=3)
    assert run.why_not == "exact decodes one sequence in a pass"
    found = {step.number: step.result.tokens for step in run if step.result is not None}
    assert [found[number] for number in range(3)] == [key[0] for key in expected]


def test_exact_allows_few_draft_tokens() -> None:
    with pytest.raises(OptionError, match="at most 4 draft tokens a round, not 5"):
        Options(num_draft=5, exact=True)
