"""What is too large is refused before anything takes long over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra server is not installed")

from starlette.responses import JSONResponse

from mlx_specdec.engine.loading import load
from mlx_specdec.sampling import grammar
from mlx_specdec.sampling.constraint import Alphabet
from mlx_specdec.serve import body, fields, requests
from mlx_specdec.serve.answers import AT_ONCE, rendered
from mlx_specdec.serve.chat import tool_call
from mlx_specdec.serve.problems import Problem
from mlx_specdec.serve.requests import RequestParser
from mlx_specdec.serve.service import Service
from mlx_specdec.serve.settings import Limits, ServiceSettings

from ..support.serving import OPTIONS, user

LONGEST = 64
FITS = fields.MOST_CHARACTERS * LONGEST


class Counted:
    """A tokenizer, and how many characters it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode(text)


@pytest.fixture
def parser(llama: tuple[Path, Path]) -> RequestParser:
    pair = load(llama[0])
    object.__setattr__(pair, "tokenizer", Counted(pair.tokenizer))
    settings = ServiceSettings(Limits(context=LONGEST))
    return RequestParser(pair, OPTIONS, settings, "tiny")


def refused(parser: RequestParser, **given: Any) -> Problem:
    parser.pair.tokenizer.characters = 0
    ask = parser.chat if "messages" in given else parser.completions
    with pytest.raises(Problem) as caught:
        ask(given)
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": " " * FITS + "x"},
        {"prompt": ["x", "[" * (FITS + 1)]},
        {"messages": [user("x" * FITS)]},
        {"messages": [user("")] * FITS},
        {"messages": [user("x")], "chat_template_kwargs": {"a": ["x" * FITS]}},
        {"prompt": "x", "prediction": {"type": "content", "content": "x" * FITS}},
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(
    parser: RequestParser, given: dict[str, Any]
) -> None:
    problem = refused(parser, **given)
    assert (problem.status, problem.code) == (400, "context_length_exceeded")
    assert parser.pair.tokenizer.characters <= 1


def test_prompts_that_are_too_many_are_not_tokenized(parser: RequestParser) -> None:
    problem = refused(parser, prompt=["x"] * 9, n=2)
    assert "send several requests" in problem.message
    assert parser.pair.tokenizer.characters == 0


def test_a_text_of_few_tokens_fits(parser: RequestParser) -> None:
    found = parser.completions({"prompt": [5] * (LONGEST - 1)})
    assert found.prompt_tokens == LONGEST - 1
    assert refused(parser, prompt="é" * LONGEST).code == "context_length_exceeded"
    assert parser.pair.tokenizer.characters == LONGEST


@pytest.mark.parametrize(
    ("given", "param", "tokens"),
    [
        ({"prompt": [5] * LONGEST}, "prompt", LONGEST),
        ({"prompt": [5] * (FITS + 1)}, "prompt", FITS + 1),
        ({"prompt": [[5], [5] * 100]}, "prompt", 100),
        ({"prompt": "é" * LONGEST}, "prompt", LONGEST + 1),
        ({"messages": [user("é" * 46)]}, "messages", 64),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_as_clients_know_it(
    parser: RequestParser, given: dict[str, Any], param: str, tokens: int
) -> None:
    problem = refused(parser, **given)
    assert (problem.status, problem.code, problem.param) == (400, "context_length_exceeded", param)
    assert problem.message == (
        f"the prompt has {tokens} tokens, and prompt and answer together take at most {LONGEST}: "
        "shorten it"
    )


def test_token_ids_that_fit_once_they_are_truncated_are_read(parser: RequestParser) -> None:
    found = parser.completions({"prompt": [5] * FITS, "truncate_prompt_tokens": 3})
    assert found.prompt_tokens == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": [5, True]}, "prompt[1] must be a token id below {ids}, not true"),
        ({"prompt": [5, -1]}, "prompt[1] must be a token id below {ids}, not -1"),
        (
            {"prompt": [[5]] * 17},
            "prompt must be a list of 1 to 16 entries, not a list of 17 entries",
        ),
        ({"prompt": ""}, 'prompt must be a non-blank string, not ""'),
        (
            {"n": 1},
            "prompt is missing: it must be a string, a list of token ids, or a list of either",
        ),
        (
            {"prompt": "x", "temperature": -1.0},
            "temperature must be 0 or a number from 1e-30 to 1e+30, not -1.0",
        ),
        ({"prompt": "x", "min_p": 1}, "min_p must be a number from 0 to less than 1, not 1"),
        (
            {"prompt": "x", "repetition_penalty": 0},
            "repetition_penalty must be a number from 1e-06 to 1e+06, not 0",
        ),
        (
            {"prompt": "x", "stop": "y" * 1025},
            "stop must be a string of 1 to 1024 characters, not a string of 1025 characters",
        ),
        (
            {"prompt": "x", "structured_outputs": {"y" * 10**6: 1}},
            f"structured_outputs.{'y' * 60} is not supported by this server: leave it out",
        ),
        ({"messages": []}, "messages must be a non-empty list, not []"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            'messages[0].content[0].type must be "text", which is all that this server reads, '
            'not "image_url"',
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content must be a string or a list, each entry of which is "
            '{"type": "text", "text": ...}, not 5',
        ),
        (
            {"messages": [user("x")], "response_format": {"type": "y" * 10**6, "z": [1]}},
            'response_format must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": {...}}}, not '
            '{"type": a string of 1000000 characters, "z": ...}',
        ),
    ],
    ids=lambda each: str(each)[:60],
)
def test_an_error_says_what_was_wrong_with_the_value(
    parser: RequestParser, given: dict[str, Any], message: str
) -> None:
    assert refused(parser, **given).message == message.replace("{ids}", str(parser.pair.vocabulary))


def test_only_a_few_long_texts_are_tokenized_at_once(
    parser: RequestParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LONG", 10)
    with contextlib.ExitStack() as others:
        for _ in range(4):
            others.enter_context(parser._bounded("x" * 11, "prompt"))
        assert refused(parser, prompt="x" * 11).status == 429
        parser.completions({"prompt": "x" * 10})
    assert parser.completions({"prompt": "x" * 11}).prompt_tokens > 0


def test_a_template_of_the_clients_own_is_refused(parser: RequestParser) -> None:
    for name in ("chat_template", "tools", "documents", "messages", "continue_final_message"):
        given = {"messages": [user("x")], "chat_template_kwargs": {name: "{{ a }}"}}
        problem = refused(parser, **given)
        assert problem.message.startswith(f"chat_template_kwargs.{name} is not supported")
        assert problem.status == 400


def structured(value: object) -> tuple[int, int]:
    """Objects, lists and names of a value, and the commas in it."""
    if not isinstance(value, dict | list) or not value:
        return int(isinstance(value, dict | list)), 0
    within: Sequence[object] = [*value.values()] if isinstance(value, dict) else value
    names = len(value) if isinstance(value, dict) else 0
    each = [structured(one) for one in within]
    return 1 + names + sum(a for a, _ in each), len(value) - 1 + sum(b for _, b in each)


def any_value(dice: random.Random, depth: int = 0) -> object:
    text = "".join(dice.choice('a,[{:"\\ é') for _ in range(dice.randrange(8)))
    kind = dice.randrange(4 if depth < 4 else 2)
    if kind < 2:
        return dice.choice([text, dice.randrange(99), None])
    if kind == 2:
        return [any_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return {f"{text}{at}": any_value(dice, depth + 1) for at in range(dice.randrange(4))}


def test_the_structure_of_json_is_counted_without_parsing_it() -> None:
    dice = random.Random(5)
    for _ in range(300):
        value = any_value(dice)
        containers, commas = structured(value)
        data = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode()
        assert body._structure(data) == 16 * containers + commas


@pytest.mark.parametrize("unit", [b"[],", b'"a":1,', b"{},", b"1,2,3,4,5,6,7,8,9,"])
def test_json_of_too_much_structure_is_not_parsed(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b'{"x":[' + unit * (20 * body.MOST_CONTAINERS // len(unit) * 3) + b"1]}"
    monkeypatch.setattr(json, "loads", lambda *given, **named: pytest.fail("it was parsed"))
    with pytest.raises(Problem, match=r"more than 65,536 objects, .* or 1,048,576 values in lists"):
        body.parse(data)


def test_json_that_is_mostly_text_is_parsed_whatever_stands_in_it() -> None:
    text = '[{"a": "b\\\\", "c": [1, 2]}, ' * 200_000
    assert body.parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    ids = [7] * 1_000_000
    assert body.parse(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}
    assert body.parse(b'\xef\xbb\xbf{"a": "\\u00e9\\ud83d\\ude42"}') == {"a": "é🙂"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        ('{"a": "∀"}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a number of too many digits"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[1]", "must be a JSON object"),
        (b" ", "the body is empty"),
    ],
)
def test_what_is_no_json_is_told_why(data: bytes, words: str) -> None:
    with pytest.raises(Problem, match=words):
        body.parse(data)


def test_arguments_of_earlier_calls_are_bounded_like_bodies() -> None:
    for count in (3, body.MOST_CONTAINERS + 1):
        arguments = '{"a": [' + "[]," * count + "1]}"
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        read = json.loads(arguments) if count == 3 else {"arguments": arguments}
        assert tool_call(call)["function"]["arguments"] == read


def test_a_grammar_is_compiled_once_and_before_the_engine_has_it(
    parser: RequestParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    made: list[str] = []
    for owner, name in ((grammar, "_checked"), (Alphabet, "_matcher")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, own=own: made.append("") or own(*given))
    bodies = [{"prompt": "x", "regex": f"[ab]{{{count}}}"} for count in range(1, 41)]
    waiting = [parser.completions(each).requests[0] for each in bodies]
    assert len(made) == 2 * len(bodies)
    for request in waiting:
        own = replace(request.options, seed=7)
        assert parser.pair.constraint(own.constraint) is not None
    assert len(made) == 2 * len(bodies)


def body_of(*chunks: bytes) -> Any:
    """A request whose body comes in these chunks, and the rest when nobody waits any more."""

    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
            await asyncio.sleep(0)

    return SimpleNamespace(stream=stream)


def test_large_bodies_have_a_bound_together_and_leave_room_for_small_ones() -> None:
    engine: Any = SimpleNamespace(batch_size=1)
    own = Service(engine, "tiny", ServiceSettings(Limits(large_bytes=1000)))
    large = b'{"a": "' + b"x" * (1 << 16) + b'"}'
    twice = [large[:40_000], large[40_000:], b" " * 600]

    async def all_at_once() -> list[Any]:
        bodies = [twice, twice, [b'{"a": ', b"1}"]]
        return await asyncio.gather(
            *(own._body(body_of(*each)) for each in bodies), return_exceptions=True
        )

    first, second, small = asyncio.run(all_at_once())
    assert first == json.loads(large) and small == {"a": 1}
    assert isinstance(second, Problem) and second.status == 429
    assert own._large_bytes == 0
    assert asyncio.run(own._body(body_of(*twice))) == first


def test_a_large_answer_is_written_a_few_entries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(7)
    tokens = [{"token": "é", "top_logprobs": [{"bytes": [1, 2]}] * 20} for _ in range(1000)]
    values = [any_value(dice) for _ in range(100)] + [{"choices": [{"a": tokens}] * 3, "n": 1.5}]
    largest = 0
    own = json.dumps

    def dumps(value: object, **named: Any) -> str:
        nonlocal largest
        largest = max(largest, len(value) if isinstance(value, list) else 0)
        return own(value, **named)

    monkeypatch.setattr(json, "dumps", dumps)
    for value in values:
        assert json.loads(rendered(value)) == value
    assert largest == AT_ONCE
    value = {"b": [], "é": {}, "c": ["\u2028", None]}
    assert rendered(value).encode() == JSONResponse(value).body
