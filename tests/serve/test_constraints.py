"""Texts that requests bind to a schema, an expression or a grammar, under their clients' names."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

from starlette.testclient import TestClient

from mlx_specdec import process
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Request
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.settings import Limits

from ..support.serving import CHAT, COMPLETIONS, SCHEMA, TEXT, client_of, ok, running, streamed

JSON = r'\{"name": "[a-z]{1,4}", "age": \d{1,2}\}'
OF_OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
GRAMMAR = 'start: "(" ("é" | "ab"){1,3} ")"'
GBNF = 'root ::= "(" part{1,3} ")" # as llama.cpp writes it\npart ::= "é" | "ab"\n'
FITTING = [
    ({"response_format": OF_OPENAI}, JSON),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "choice": None}}, JSON),
    ({"structured_outputs": {"regex": "[ab]{3}é", "grammar": None}}, "[ab]{3}é"),
    ({"regex": "[ab]{3}é", "response_format": {"type": "text"}}, "[ab]{3}é"),
    ({"structured_outputs": {"grammar": GRAMMAR}}, r"\((é|ab){1,3}\)"),
    ({"grammar": GRAMMAR}, r"\((é|ab){1,3}\)"),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_regex": "[ab]{3}é"}, "[ab]{3}é"),
    ({"grammar": GBNF}, r"\((é|ab){1,3}\)"),
    ({"guided_grammar": GRAMMAR}, r"\((é|ab){1,3}\)"),
    ({"guided_choice": ["(é)", '("ab\\']}, r"\(é\)|\(\"ab\\"),
    ({"structured_outputs": {"choice": ["(é)", '("ab\\']}}, r"\(é\)|\(\"ab\\"),
]
USER = [{"role": "user", "content": TEXT}]


@pytest.fixture
def nothing_decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where a request reaches the engine."""

    def refuse(self: Engine, requests: list[Request], listener: object) -> None:
        raise AssertionError("a request was handed to the engine")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "submit", refuse)
        yield


@pytest.mark.parametrize(("settings", "pattern"), FITTING, ids=lambda each: str(each)[:50])
def test_texts_fit_whoever_drafts(
    client: TestClient, settings: dict[str, Any], pattern: str
) -> None:
    """Each kind of format has several names: greedily under the one, drawn under the other."""
    names = [each for each, other in FITTING if other == pattern]
    body = {"prompt": TEXT, "temperature": names.index(settings) % 2, "seed": 4, "max_tokens": 60}
    answer = ok(client, COMPLETIONS, **body, **settings)
    [choice] = answer["choices"]
    assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"
    plain = ok(client, COMPLETIONS, **body, **settings, speculative=False)
    assert plain["choices"] == answer["choices"]
    chunks = streamed(client, COMPLETIONS, **body, **settings)
    assert "".join(each["choices"][0]["text"] for each in chunks) == choice["text"]
    message = {"role": "user", "content": "Who?"}
    [choice] = ok(client, CHAT, messages=[message], max_tokens=60, **settings)["choices"]
    assert re.fullmatch(pattern, choice["message"]["content"])


@pytest.mark.parametrize(
    ("settings", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", 'must be {"type": "text"}'),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "strin"}}},
            "response_format",
            "Invalid type: strin",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"not": {}}}},
            "response_format",
            "accepts nothing",
        ),
        ({"guided_regex": "a", "regex": "a"}, "response_format", "at most one of"),
        ({"regex": 5}, "regex", "must be a non-blank string, not 5"),
        ({"regex": "a("}, "regex", "unclosed group"),
        ({"grammar": "root ::= x"}, "grammar", "grammar is wrong: Rule 'x' not found"),
        ({"grammar": "root ::= " + "(" * 9999}, "grammar", "too many brackets"),
        (
            {"structured_outputs": {}},
            "structured_outputs",
            "one of json, regex, grammar and choice",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "is no JSON"),
        ({"structured_outputs": {"json": "[" * 9999}}, "structured_outputs", "more than 64 deep"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined"),
        ({"structured_outputs": {"tag": "a"}}, "structured_outputs.tag", "not supported"),
        ({"regex": "a" * 65537}, "regex", "more than 65536 bytes"),
    ],
    ids=lambda each: str(each)[:50],
)
def test_what_is_wrong_is_reported_before_anything_is_decoded(
    client: TestClient, nothing_decoded: None, settings: dict[str, Any], param: str, said: str
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": TEXT}), (CHAT, {"messages": USER})):
        answer = client.post(path, json={**prompt, **settings, "stream": True})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert said in error["message"] and "\n" not in error["message"]


def test_a_schema_is_nested_within_bounds(engine: Engine) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    body = {"prompt": TEXT, "structured_outputs": {"json": schema}}
    for depth, status in ((6, 200), (5, 400)):
        answer = client_of(engine, Limits(schema_depth=depth)).post(COMPLETIONS, json=body)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"] == "structured_outputs is nested more than 5 deep"


def test_the_extra_that_is_missing_is_named(
    client: TestClient, nothing_decoded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    schema = {"type": "object", "properties": {"nobody asked for this": {"type": "integer"}}}
    body = {"type": "json_schema", "schema": schema}
    answer = client.post(COMPLETIONS, json={"prompt": TEXT, "response_format": body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert process.install("grammar") in answer.json()["error"]["message"]


def test_a_grammar_that_grows_too_complex_ends_its_own_request_alone(
    client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    ids = {piece: id for id, piece in enumerate(pair.tokenizer.pieces())}
    exploding = {"grammar": 'start: "a" | start start | start start start'}
    body = {"prompt": TEXT, "max_tokens": 3000, "logit_bias": {str(ids["a"]): 90}, **exploding}
    free = {"prompt": TEXT, "temperature": 1.0, "seed": 8, "max_tokens": 24}
    with ThreadPoolExecutor(2) as clients:
        ending = clients.submit(client.post, COMPLETIONS, json=body)
        others = [ok(client, COMPLETIONS, **free)["choices"][0]["text"] for _ in range(3)]
        answer = ending.result()
    assert {*others} == {alone(pair.tokenizer.encode(TEXT), temperature=1.0, seed=8)}
    assert answer.status_code == 400, answer.text
    assert "too complex" in answer.json()["error"]["message"]


def test_a_translator_says_what_it_cannot_write() -> None:
    """The shipped one's vocabulary has no braces, and French and English letters alone."""
    prompt = "translate English to French: I am cold."
    with running(("weights/t5-enfr", "weights/t5-enfr-draft")) as engine:
        client = client_of(engine)

        def said(**settings: Any) -> str:
            answer = client.post(COMPLETIONS, json={"prompt": prompt, **settings})
            assert answer.status_code == 400
            return answer.json()["error"]["message"]

        assert "no token that may come first" in said(response_format=OF_OPENAI)
        assert "no token for what must follow" in said(regex="Je suis 日本")
        [choice] = ok(client, COMPLETIONS, prompt=prompt, regex="(Je|Il) [a-z ]+froid\\.")[
            "choices"
        ]
        assert re.fullmatch(r"(Je|Il) [a-z ]+froid\.", choice["text"])


@pytest.mark.parametrize("regex", ["[ab]", "(x[ab]|[ab])", "x{3}[ab]"])
def test_bans_that_leave_nothing_of_a_grammar_are_the_clients_fault(
    client: TestClient, pair: Pair, regex: str
) -> None:
    """At the door, and where only the text shows it."""
    ids = {text: pair.tokenizer.encode(text)[-1] for text in "ab"}
    bans = {str(id): float("-inf") for id in ids.values()}
    body = {"prompt": TEXT, "regex": regex, "logit_bias": bans, "max_tokens": 9}
    answer = client.post(COMPLETIONS, content=json.dumps(body).replace("-Infinity", "-1e999"))
    error = answer.json()["error"]
    assert answer.status_code == 400 and "logit-bias bans" in error["message"]
    assert error["type"] == "invalid_request_error" and "damaged" not in answer.text
