"""What is too large is refused before anything takes long over it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.engine.loading import load
from mlx_specdec.serve import bodies as body
from mlx_specdec.serve.answer_models import Anything
from mlx_specdec.serve.bodies import Fields
from mlx_specdec.serve.models import ChatRequest, TextRequest
from mlx_specdec.serve.problems import Problem
from mlx_specdec.serve.registry import Registry, ServedModel
from mlx_specdec.serve.requests import MOST_CHARACTERS, ParsedRequest, RequestParser
from mlx_specdec.serve.service import Endpoint, Service
from mlx_specdec.serve.settings import Limits, ServiceSettings
from mlx_specdec.text.messages import tool_call

from ..support.serving import OPTIONS, user

LONGEST = 64
FITS = MOST_CHARACTERS * LONGEST


class Counted:
    """A tokenizer that counts the characters that it reads."""

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


def read(parser: RequestParser, given: dict[str, Any]) -> ParsedRequest:
    if "messages" in given:
        return parser.chat(ChatRequest.read(given))
    return parser.completions(TextRequest.read(given))


def refused(parser: RequestParser, **given: Any) -> Problem:
    parser.pair.tokenizer.characters = 0
    with pytest.raises(Problem) as caught:
        read(parser, given)
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": ["x", "[" * (FITS + 1)]},
        {"messages": [user("")] * FITS},
        {"messages": [user("x")], "chat_template_kwargs": {"a": ["x" * FITS]}},
        {"prompt": "x", "prediction": {"type": "content", "content": "x" * (FITS + 1)}},
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(
    parser: RequestParser, given: dict[str, Any]
) -> None:
    problem = refused(parser, **given)
    assert (problem.status, problem.code) == (400, "context_length_exceeded")
    assert parser.pair.tokenizer.characters <= 1


@pytest.mark.parametrize(
    ("given", "param", "tokens"),
    [
        ({"prompt": [5] * LONGEST}, "prompt", LONGEST),
        ({"prompt": [[5], [5] * 100]}, "prompt", 100),
        ({"prompt": "é" * LONGEST}, "prompt", LONGEST + 1),
        ({"messages": [user("é" * 46)]}, "messages", 64),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_with_its_length(
    parser: RequestParser, given: dict[str, Any], param: str, tokens: int
) -> None:
    problem = refused(parser, **given)
    assert (problem.status, problem.code, problem.param) == (400, "context_length_exceeded", param)
    assert f"prompt is too long: {tokens} tokens > {LONGEST - 1} maximum" in problem.message
    assert f"maximum context length is {LONGEST} tokens" in problem.message


def test_token_ids_that_fit_are_read(parser: RequestParser) -> None:
    assert read(parser, {"prompt": [5] * (LONGEST - 1)}).prompt_tokens == LONGEST - 1
    cut = read(parser, {"prompt": [5] * FITS, "truncate_prompt_tokens": 3})
    assert cut.prompt_tokens == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": [5, True]}, "prompt[1] must be a whole number, not true"),
        ({"prompt": [5, -1]}, "prompt[1] must be a token id below {ids}, not -1"),
        (
            {"prompt": "x", "structured_outputs": {"y" * 10**6: 1}},
            f"structured_outputs.{'y' * 60} is not supported by this server: leave it out",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "the newest message of the user has a part of the type 'image_url', and this model "
            "reads only text: leave it out",
        ),
        (
            {"prompt": "x", "guided_choice": {"type": "y" * 10**6, "z": [1]}},
            f"guided_choice must be a non-empty list, each entry of which is a string, not "
            f'{{"type": "{"y" * 50}...',
        ),
    ],
    ids=lambda each: str(each)[:60],
)
def test_an_error_names_the_field_and_shows_a_little_of_its_value(
    parser: RequestParser, given: dict[str, Any], message: str
) -> None:
    assert refused(parser, **given).message == message.replace("{ids}", str(parser.pair.vocabulary))


def test_requests_cannot_replace_the_chat_template(parser: RequestParser) -> None:
    for name in ("chat_template", "tools", "documents", "messages", "continue_final_message"):
        given = {"messages": [user("x")], "chat_template_kwargs": {name: "{{ a }}"}}
        problem = refused(parser, **given)
        assert problem.message.startswith(f"chat_template_kwargs.{name} is not supported")
        assert problem.status == 400


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"a": "∀"}'.encode("utf-16"), "invalid start byte"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too many digits"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[1]", "must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(Problem, match=words):
        body.parse(data)
    assert body.parse(b'\xef\xbb\xbf{"a": "\\u00e9\\ud83d\\ude42"}') == {"a": "é🙂"}


def test_numbers_without_a_float_become_the_largest() -> None:
    most = sys.float_info.max
    assert body.parse(b'{"a": [1e999, -1e999, 0.5]}') == {"a": [most, -most, 0.5]}


def test_half_a_character_is_replaced_in_every_string_of_a_body() -> None:
    data = rb'{"a\\ud83d": [{"\ude42": "x\ud83d"}, "\ud83d\ude42\ud83dy", 0.1, 9007199254740993]}'
    assert body.parse(data) == {
        r"a\ud83d": [{"\ufffd": "x\ufffd"}, "🙂\ufffdy", 0.1, 9007199254740993]
    }
    call = {"function": {"name": "x", "arguments": r'{"a": "\ud83d"}'}}
    assert tool_call(call)["function"]["arguments"] == {"a": "\ufffd"}


def body_of(*chunks: bytes) -> Any:
    """A request whose body comes in these chunks."""

    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
            await asyncio.sleep(0)

    return SimpleNamespace(stream=stream, headers={}, scope={})


def test_large_bodies_have_a_bound_together_and_leave_room_for_small_ones() -> None:
    registry = Registry(
        [ServedModel("tiny", lambda: None, (), ServiceSettings(Limits(large_bytes=1000)))]
    )
    registry.prepare = lambda model: True  # type: ignore[method-assign]
    registry.parser = lambda *about: None  # type: ignore[method-assign]
    service = Service(registry)
    echo = Endpoint("/", lambda parser, body: body, Anything, "Sends a body back", Fields)
    large = b'{"a": "' + b"x" * (1 << 16) + b'"}'
    twice = [large[:40_000], large[40_000:], b" " * 600]

    async def read_all(*bodies: list[bytes]) -> list[Any]:
        return await asyncio.gather(
            *(service._parse(body_of(*each), echo) for each in bodies), return_exceptions=True
        )

    first, second, small = asyncio.run(read_all(twice, twice, [b'{"a": ', b"1}"]))
    assert first == json.loads(large) and small == {"a": 1}
    assert isinstance(second, Problem) and second.status == 429
    assert asyncio.run(read_all(twice)) == [first]
