"""One property: a text is the same alone, drafted, in a batch and with a prompt cache.

Requests are drawn at random from a seed: prompts and lengths of their own, ends, stop strings and
max_tokens that fall inside of drafts, grammars, banned tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from mlx_specdec.decoding.run import Result
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.many import ManyRun, Part, Request, generate_many
from mlx_specdec.engine.memory import FixedBatchSize
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.errors import DecodingError
from mlx_specdec.options import Options

from .support.letters import CASES, END, PIECES, bound
from .support.pairs import with_heads
from .support.shipped import ROOT, prompts

Outcome = tuple[tuple[int, ...], str, str] | str
"""Tokens, text and finish reason, or the error."""
ROOM = 1 << 24
SYSTEM = [11, 23, 5, 9, 31, 7, 8, 19, 33, 4]
CONSTRAINTS: list[dict[str, object]] = [
    {},
    {},
    *CASES.values(),
    {"regex": "ab(ab|c)?"},
    {"regex": "[abc]{4,9}z"},
    {"regex": "abc: (1|2) [ab]{3}z"},
]
"""The last two need a token that the model lacks, and the one before them soon leaves none."""


@pytest.fixture(scope="module", params=["llama", "own-head-scaled"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return with_heads(bound(request.param))


def of(result: Result) -> Outcome:
    return result.tokens, result.text, result.finish_reason


def alone(pair: Pair, request: Request, cache: PromptCache | None = None, **changes) -> Outcome:
    options = replace(request.options, **changes)
    try:
        return of(stream_generate(pair, request.prompt, options, cache=cache).result())
    except DecodingError as problem:
        return str(problem)


def together(many: ManyRun, requests: list[Request], dice: random.Random) -> list[Outcome]:
    """Requests that come one by one, some of them while others are decoded."""
    parts: list[Part] = []
    for number, request in enumerate(requests):
        many.add(number, request)
        for _ in range(dice.choice([0, 0, 1, 4])):
            parts += many.step()
    parts += many
    last = {part.number: part for part in parts if part.last}
    return [
        last[number].error or of(last[number].result)  # type: ignore[arg-type]
        for number in range(len(requests))
    ]


def drawn(pair: Pair, dice: random.Random) -> Request:
    """A request whose end is likely to be inside of a draft."""
    tail = [dice.randrange(3, len(PIECES)) for _ in range(dice.choice([1, 2, 9, 20]))]
    options = Options(
        max_tokens=dice.choice([1, 3, 6, 7, 13, 30]),
        temperature=dice.choice([0.0, 0.8]),
        seed=dice.randrange(1 << 30),
        frequency_penalty=dice.choice([0.0, 1.0]),
        top_k=dice.choice([0, 9]),
        logit_bias=dice.choice([{}, {END: -math.inf}, {END: 4.0}]),
        num_draft=dice.choice([0, 1, 2, 4]),
        cost_cache=False,
        **dice.choice(CONSTRAINTS),
    )
    request = Request(SYSTEM * dice.choice([0, 1]) + tail, options)
    run = stream_generate(pair, request.prompt, replace(options, regular=True))
    text, tokens, stuck = "", 0, False
    try:
        for emission in run:
            text, tokens = text + emission.text, tokens + len(emission.tokens)
    except DecodingError:
        stuck = True
    if len(text) < 4:
        return request
    # Half of the texts that cannot go on end just there, for another reason.
    at = len(text) - 2 if stuck else dice.randrange(len(text) - 1)
    ends = [{"stop": text[at : at + 2]}, {"max_tokens": tokens}, {"extra_eos_token": "b"}, {}]
    return replace(request, options=replace(options, **dice.choice(ends)))


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_of_plain_decoding_alone(pair: Pair, seed: int) -> None:
    dice = random.Random(seed)
    proposer = ("draft", "ngram", "medusa", "auto")[seed]
    requests = [drawn(pair, dice) for _ in range(24)]
    plain = [alone(pair, each, regular=True) for each in requests]
    cache = PromptCache(ROOM)
    for number, (each, expected) in enumerate(zip(requests, plain, strict=True)):
        drafting = {"proposer": proposer, "num_draft": 1 + number % 5}
        assert alone(pair, each, cache, **drafting) == expected, each
    options = Options(num_draft=4, proposer=proposer, cost_cache=False)
    requests = [replace(r, options=replace(r.options, proposer=proposer)) for r in requests]
    for kept in (None, cache):
        many = ManyRun(pair, None, options, FixedBatchSize(5), kept)
        assert together(many, requests, dice) == plain
    reasons = {text if isinstance(text, str) else text[2] for text in plain}
    assert len(reasons) > 1


RULES = [
    {"rule": "token", "temperature": 0.8},
    {"rule": "block", "temperature": 0.8},
    {"rule": "typical", "temperature": 0.8},
    {"rule": "typical", "temperature": 0.0},
    {"delta": 0.5, "temperature": 0.8},
    {"delta": 1.0, "temperature": 0.0},
]


@pytest.mark.parametrize("settings", RULES, ids=lambda each: "-".join(map(str, each.values())))
def test_rows_that_draft_less_than_others_are_verified_as_alone(pair: Pair, settings: dict) -> None:
    """Under these rules a text depends on how many tokens were drafted. A row of a batch drafts as
    many as alone, but for its end: it knows only how far the longest one may go."""
    free = replace(pair, eos_token_ids=frozenset())
    asked = {"max_tokens": 24, "proposer": "draft", "cost_cache": False, **settings}
    dice = random.Random(7)
    requests = [
        Request([dice.randrange(3, 40) for _ in range(1 + 3 * seed)], Options(seed=seed, **asked))
        for seed in range(5)
    ]
    requests = [
        replace(each, options=replace(each.options, num_draft=(4, 0, 2, 1, 3)[number]))
        for number, each in enumerate(requests)
    ]
    expected = [generate(free, each.prompt, each.options).tokens for each in requests]
    results = generate_many(free, requests, Options(num_draft=4, **asked), batch_size=5)
    assert [r.tokens[:-5] for r in results] == [tokens[:-5] for tokens in expected]
    cache = PromptCache(ROOM)
    for each, tokens in zip(requests * 2, expected * 2, strict=True):
        result = stream_generate(free, each.prompt, each.options, cache=cache).result()
        assert result.tokens == tokens


@pytest.mark.parametrize(("delta", "temperature"), [(1.0, 0.0), (0.3, 0.8)])
def test_what_fills_up_a_batch_is_never_emitted(delta: float, temperature: float) -> None:
    """Token 0 is what fills it up, and neither text has it."""
    python = load(ROOT / "weights" / "py-llama")
    asked = {"max_tokens": 20, "cost_cache": False, "delta": delta, "temperature": temperature}
    options = Options(proposer="ngram", ngram_min=1, num_draft=4, **asked)
    plain = Options(proposer="none", num_draft=0, **asked)
    requests = [
        Request(prompt, options if number % 2 else plain)
        for number, prompt in enumerate(prompts("python.jsonl", 4))
    ]
    results = generate_many(python, requests, options, batch_size=4)
    assert sum(result.stats.drafted for result in results) > 0
    assert not any(0 in result.tokens for result in results)
    for result, request in zip(results[::2], requests[::2], strict=True):
        assert result.tokens == generate(python, request.prompt, request.options).tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_draft", [0, 4])
def test_what_ends_a_text_comes_before_what_cannot_follow_it(
    num_draft: int, temperature: float
) -> None:
    """The vocabulary has no {, and behind x nothing but a banned end may come."""
    translator = load(ROOT / "weights" / "t5-enfr", ROOT / "weights" / "t5-enfr-draft")
    prompt = "translate English to French: Good morning, my friend."
    asked = {"num_draft": num_draft, "temperature": temperature, "cost_cache": False}
    asked["proposer"] = "draft" if num_draft else "none"
    hello = Options(regex=r"Bonjour, mon ami\{", stop="ami", **asked)
    short = replace(hello, stop=(), max_tokens=3)
    banned = Options(regex="(ab)?x{3}", logit_bias={1: -math.inf}, **asked)
    free = Options(max_tokens=20, **asked)
    requests = [Request(prompt, options) for options in (hello, short, banned, free)]
    texts = [(each.text, each.finish_reason) for each in generate_many(translator, requests, free)]
    assert texts == [alone(translator, each, regular=True)[1:] for each in requests]
    assert texts[0] == ("Bonjour, mon ", "stop")
    assert texts[1][1] == "length"
    assert texts[2] in [("xxx", "eos"), ("abxxx", "eos")]
