"""What clients say and hear, without a socket."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("starlette", reason="the extra server is not installed")

from starlette.testclient import TestClient

from mlx_specdec.decoding.stop_criteria import TokenLogprob
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.memory import Extent
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Request
from mlx_specdec.options import Options
from mlx_specdec.serve.answers import Choice, ParsedRequest, server_sent_event
from mlx_specdec.serve.app import Access, make_app
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.openai import TextWriter
from mlx_specdec.serve.requests import RequestParser
from mlx_specdec.serve.service import ResponseStream, Service
from mlx_specdec.serve.settings import Limits, ServiceSettings
from mlx_specdec.text.vocabulary import token_bytes

from ..support.models import make_llama
from ..support.serving import (
    CHAT,
    COMPLETIONS,
    OPEN,
    OPTIONS,
    TEXT,
    broken_after,
    client_of,
    ok,
    running,
    streamed,
    wait_until,
)

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def client(engine: Engine) -> TestClient:
    return client_of(engine)


def test_a_completion_has_what_clients_read(
    client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0.8, "seed": 5}
    told = ok(client, COMPLETIONS, model="tiny", **body)
    ids = pair.tokenizer.encode(TEXT)
    [choice] = told["choices"]
    text = alone(ids, max_tokens=12, temperature=0.8, seed=5)
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    assert told["object"] == "text_completion" and told["id"].startswith("cmpl-")
    assert told["model"] == "tiny" and isinstance(told["created"], int)
    assert told["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 12,
        "total_tokens": len(ids) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    timings = told["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (len(ids), 12)
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"] > 0
    assert timings["predicted_per_second"] > 0


def test_a_chat_has_what_clients_read(
    client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    told = ok(client, CHAT, messages=messages, max_completion_tokens=9, temperature=0)
    prompt = "ASSISTANT's RULE: Be short.\nUSER: ab\nASSISTANT: c\nUSER: d\nASSISTANT:"
    [choice] = told["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": alone(pair.tokenizer.encode(prompt), max_tokens=9),
        "refusal": None,
    }
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert told["object"] == "chat.completion" and told["id"].startswith("chatcmpl-")


def test_a_stream_is_the_same_answer_in_pieces(client: TestClient) -> None:
    body = {"max_tokens": 15, "temperature": 0.9, "seed": 2}
    chat = {"messages": [{"role": "user", "content": TEXT}], **body}
    whole = ok(client, CHAT, **chat)["choices"][0]["message"]["content"]
    first, *chunks, last = streamed(client, CHAT, **chat)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"]["content"] for each in chunks) == whole
    assert last["choices"][0]["delta"] == {}
    reasons = [each["choices"][0]["finish_reason"] for each in (first, *chunks, last)]
    assert reasons == [*[None] * (len(chunks) + 1), "length"]
    assert {each["object"] for each in (first, *chunks, last)} == {"chat.completion.chunk"}
    assert len({each["id"] for each in (first, *chunks, last)}) == 1
    assert last["timings"]["predicted_n"] == 15
    completion = {"prompt": TEXT, **body}
    whole = ok(client, COMPLETIONS, **completion)["choices"][0]["text"]
    chunks = streamed(client, COMPLETIONS, **completion)
    assert "".join(each["choices"][0]["text"] for each in chunks) == whole


def test_an_event_has_the_lines_that_it_should_have_whoever_splits_it() -> None:
    told = {"type": "x", "text": "é\x85日\u2028😀\u2029"}
    name, data, end = server_sent_event(told, named=True).decode().splitlines()
    assert (name, end) == ("event: x", "")
    assert json.loads(data.removeprefix("data: ")) == told


def test_usage_is_streamed_to_those_who_ask_for_it(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 4}
    *_, last = streamed(client, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all("usage" not in each for each in streamed(client, COMPLETIONS, **body))
    assert all(each["choices"] for each in streamed(client, COMPLETIONS, **body, stream_options={}))


def test_figures_in_vllms_names_are_told_on_demand(engine: Engine, client: TestClient) -> None:
    app = make_app(Service(engine, "tiny", ServiceSettings(metrics=True)), OPEN)
    telling = TestClient(app, raise_server_exceptions=False)
    body = {"prompt": TEXT, "max_tokens": 20, "n": 2}
    answer = ok(telling, COMPLETIONS, **body)
    told, timings = answer["metrics"]["speculative_decoding"], answer["timings"]
    assert told["num_draft_tokens"] == timings["draft_n"] > 0
    assert told["num_accepted_draft_tokens"] == timings["draft_n_accepted"]
    histogram, steps = told["acceptance_histogram"], told["num_spec_steps"]
    assert sum(histogram) == steps and len(histogram) == told["num_spec_tokens"] + 1 == 3
    assert min(histogram) >= 0
    accepted = sum(place * count for place, count in enumerate(histogram))
    assert accepted == told["num_accepted_draft_tokens"]
    assert told["mean_acceptance_length"] == round(1 + accepted / steps, 4)
    assert told["draft_acceptance_rate"] == round(accepted / told["num_draft_tokens"], 4)
    *_, last = streamed(telling, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert last["metrics"]["speculative_decoding"].keys() == told.keys()
    assert "metrics" not in ok(telling, COMPLETIONS, **body, speculative=False)
    assert "metrics" not in ok(client, COMPLETIONS, **body)


def test_choices_have_seeds_one_after_the_other(client: TestClient) -> None:
    body = {"prompt": TEXT, "temperature": 1.0, "max_tokens": 10}
    told = ok(client, COMPLETIONS, **body, seed=7, n=3)
    alone = [ok(client, COMPLETIONS, **body, seed=7 + each) for each in range(3)]
    assert [each["text"] for each in told["choices"]] == [
        each["choices"][0]["text"] for each in alone
    ]
    assert [each["index"] for each in told["choices"]] == [0, 1, 2]
    assert told["usage"]["completion_tokens"] == 30
    assert told["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    pieces = dict.fromkeys(range(3), "")
    for chunk in streamed(client, COMPLETIONS, **body, seed=7, n=3):
        pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(pieces.values()) == [each["text"] for each in told["choices"]]


def test_prompts_may_be_several_and_token_ids(client: TestClient, pair: Pair) -> None:
    ids = pair.tokenizer.encode(TEXT)
    single = ok(client, COMPLETIONS, prompt=TEXT)["choices"][0]["text"]
    for prompt in ([TEXT], ids, [ids]):
        assert ok(client, COMPLETIONS, prompt=prompt)["choices"][0]["text"] == single
    told = ok(client, COMPLETIONS, prompt=[TEXT, "naïve", TEXT])
    assert [told["choices"][each]["text"] == single for each in range(3)] == [True, False, True]
    assert [each["index"] for each in told["choices"]] == [0, 1, 2]


def test_without_a_seed_texts_differ(client: TestClient) -> None:
    body = {"prompt": TEXT, "temperature": 1.0, "max_tokens": 20}
    texts = {ok(client, COMPLETIONS, **body)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_speculation_can_be_left_out_and_the_text_stays(
    client: TestClient, temperature: float
) -> None:
    body = {"prompt": TEXT, "temperature": temperature, "seed": 1, "max_tokens": 20}
    told = [
        ok(client, COMPLETIONS, **body, **more)
        for more in ({}, {"speculative": True}, {"speculative": {"max": 1}})
    ]
    plain = [ok(client, COMPLETIONS, **body, speculative=off) for off in (False, {"max": 0})]
    assert len({each["choices"][0]["text"] for each in (*told, *plain)}) == 1
    assert all(each["timings"]["draft_n"] > 0 for each in told)
    assert not any("draft_n" in each["timings"] for each in plain)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_what_is_predicted_is_drafted_and_the_text_stays(
    client: TestClient, temperature: float
) -> None:
    body = {"prompt": TEXT, "temperature": temperature, "seed": 1, "max_tokens": 40}
    text = ok(client, COMPLETIONS, **body)["choices"][0]["text"]
    edited = text[:10] + "!?" + text[14:]
    counts = {}
    for name, content in {
        "right": text,
        "parts": [{"type": "text", "text": text}],
        "edited": edited,
        "wrong": "0 1 2 3 4 5 6 7 8 9",
        "empty": "",
    }.items():
        told = ok(client, COMPLETIONS, **body, prediction={"type": "content", "content": content})
        assert told["choices"][0]["text"] == text, name
        counts[name] = told["usage"]["completion_tokens_details"]
    accepted = {name: each["accepted_prediction_tokens"] for name, each in counts.items()}
    assert accepted["right"] == accepted["parts"] > accepted["edited"] > accepted["wrong"] == 0
    assert counts["wrong"]["rejected_prediction_tokens"] > 0
    assert counts["empty"]["rejected_prediction_tokens"] == 0
    answer = client.post(COMPLETIONS, json={**body, "prediction": {"type": "guess"}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction"


def test_stops_are_never_in_the_text(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 20}
    text = ok(client, COMPLETIONS, **body)["choices"][0]["text"]
    stop = text[5:7]
    for given in (stop, [stop], ["never seen", stop]):
        [choice] = ok(client, COMPLETIONS, **body, stop=given)["choices"]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        *_, last = chunks = streamed(client, COMPLETIONS, **body, stop=given)
        assert "".join(each["choices"][0]["text"] for each in chunks) == choice["text"]
        assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_logprobs_are_the_targets_own(client: TestClient, pair: Pair, temperature: float) -> None:
    body = {"max_tokens": 12, "temperature": temperature, "seed": 1, "frequency_penalty": 0.5}
    ids = pair.tokenizer.encode(TEXT)
    told = ok(client, COMPLETIONS, prompt=ids, **body, logprobs=3)["choices"][0]
    logprobs = told["logprobs"]
    asked = Options(max_tokens=12, temperature=temperature, seed=1, frequency_penalty=0.5)
    tokens = list(generate(pair, ids, replace(asked, regular=True, cost_cache=False)).tokens)
    context = pair.target.open(ids)
    rows = context.advance(mx.array([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    expected = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    own = [expected[at, token].item() for at, token in enumerate(tokens)]
    assert logprobs["token_logprobs"] == pytest.approx(own, abs=1e-3)
    names = [each if each[:6] != "bytes:" else "\ufffd" for each in logprobs["tokens"]]
    pieces = token_bytes(pair.tokenizer)
    assert names == [pieces[token].decode("utf-8", "replace") for token in tokens]
    best = mx.sort(expected, axis=-1)[:, ::-1].tolist()
    for each, values in zip(logprobs["top_logprobs"], best, strict=True):
        assert list(each.values()) == pytest.approx(values[: len(each)], abs=1e-3)
        assert len(each) == 3
    assert logprobs["text_offset"] == [len("".join(names[:at])) for at in range(12)]
    pieces = [
        each["choices"][0]["logprobs"]
        for each in streamed(client, COMPLETIONS, prompt=ids, **body, logprobs=3)
    ]
    for name, whole in logprobs.items():
        joined = [one for piece in pieces if piece for one in piece[name]]
        if name == "token_logprobs":
            assert joined == pytest.approx(whole, abs=1e-3)
        elif name != "top_logprobs":
            assert joined == whole
    plain = ok(client, COMPLETIONS, prompt=ids, **body, speculative=False, logprobs=0)
    again = plain["choices"][0]["logprobs"]
    assert again["token_logprobs"] == pytest.approx(own, abs=1e-3)
    assert again["top_logprobs"] == [{}] * 12


def test_logprobs_of_a_chat_have_bytes(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "max_tokens": 8}
    told = ok(client, CHAT, **body, top_logprobs=2)["choices"][0]
    entries = told["logprobs"]["content"]
    assert len(entries) == 8
    for each in entries:
        assert bytes(each["bytes"]).decode("utf-8", "replace") == each["token"]
        assert each["logprob"] <= each["top_logprobs"][0]["logprob"] <= 0
        assert len(each["top_logprobs"]) == 2
    text = b"".join(bytes(each["bytes"]) for each in entries).decode("utf-8", "replace")
    assert text == told["message"]["content"]
    assert ok(client, CHAT, **body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    for wrong in ({"logprobs": 1}, {"logprobs": False, "top_logprobs": 2}, {"top_logprobs": 21}):
        assert client.post(CHAT, json={**body, **wrong}).status_code == 400


def test_the_token_that_ends_a_chat_has_no_logprob(client: TestClient, pair: Pair) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "regex": "a"}
    told = ok(client, CHAT, **body)
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["usage"]["completion_tokens"] == 2
    entries = told["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entries] == ["a"]
    for more in ({}, {"stream_options": {"include_drafted": True}}):
        choices = [each["choices"][0] for each in streamed(client, CHAT, **body, **more)]
        told = [one for each in choices if each["logprobs"] for one in each["logprobs"]["content"]]
        assert [each["token"] for each in told] == ["a"]


def test_tokens_without_a_text_have_a_name_each() -> None:
    parsed = ParsedRequest([Request([5], OPTIONS)], 1)
    logprob = TokenLogprob(0, -1.0, ((0, -1.0), (1, -2.0), (7, -3.0), (8, -4.0)))
    choice = Choice(texts=["a"], logprobs=[logprob])
    answer = TextWriter("tiny", parsed, [b"a", None]).answer([choice])
    [top] = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"a": -1.0, "token_id:1": -2.0, "token_id:7": -3.0, "token_id:8": -4.0}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_all_but_the_last_chunk_say_that_usage_is_still_to_come(
    client: TestClient, path: str
) -> None:
    body = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    *chunks, last = streamed(
        client, path, **body, max_tokens=4, stream_options={"include_usage": True}
    )
    assert chunks and all(each["usage"] is None for each in chunks)
    assert last["usage"]["completion_tokens"] == 4
    assert not any("usage" in each for each in streamed(client, path, **body, max_tokens=4))


def test_a_text_goes_on_behind_its_end_for_those_who_ignore_it(
    client: TestClient, pair: Pair
) -> None:
    ids, [end] = pair.tokenizer.encode(TEXT), pair.eos_token_ids
    bias, most = {str(end): 7}, {"max_tokens": 20, "temperature": 1.0, "seed": 1}
    endless = replace(pair, eos_token_ids=frozenset())
    options = Options(logit_bias={end: 7}, regular=True, cost_cache=False, **most)
    wanted = generate(endless, ids, options)
    assert end in wanted.tokens[:-1]
    for more in ({}, {"speculative": False}):
        told = ok(client, COMPLETIONS, prompt=ids, logit_bias=bias, **most, **more)
        assert told["choices"][0]["finish_reason"] == "stop"
        told = ok(client, COMPLETIONS, prompt=ids, logit_bias=bias, **most, **more, ignore_eos=True)
        [choice] = told["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted.text, "length")
        assert told["usage"]["completion_tokens"] == 20


def test_biases_ban_and_force(client: TestClient, pair: Pair) -> None:
    [token] = pair.tokenizer.encode("x")[1:]
    told = ok(client, COMPLETIONS, prompt=TEXT, max_tokens=4, logit_bias={str(token): 1000})
    assert told["choices"][0]["text"] == "xxxx"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", None),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": 5}, "prompt", None),
        ({"prompt": [[1], 2]}, "prompt", None),
        ({"prompt": [True]}, "prompt", None),
        ({"prompt": [10**9]}, "prompt", None),
        ({"prompt": "\ud800"}, None, None),
        ({"prompt": "x", "model": 5}, "model", None),
        ({"prompt": "x", "n": 0}, "n", None),
        ({"prompt": "x", "n": 17}, "n", None),
        ({"prompt": ["x"] * 9, "n": 2}, "prompt", None),
        ({"prompt": "x", "stream": 1}, "stream", None),
        ({"prompt": "x", "stream_options": []}, "stream_options", None),
        ({"prompt": "x", "temperature": -1}, "temperature", None),
        ({"prompt": "x", "temperature": True}, "temperature", None),
        ({"prompt": "x", "temperature": "hot"}, "temperature", None),
        ({"prompt": "x", "top_p": 1.5}, "top_p", None),
        ({"prompt": "x", "top_k": 1.5}, "top_k", None),
        ({"prompt": "x", "seed": 1.5}, "seed", None),
        ({"prompt": "x", "seed": 2**70}, "seed", None),
        ({"prompt": "x", "max_tokens": -2}, "max_tokens", None),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", None),
        ({"prompt": [7] * 4096}, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "stop": [""]}, "stop", None),
        ({"prompt": "x", "stop": 5}, "stop", None),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", None),
        ({"prompt": "x", "stop": "a" * 2000}, "stop", None),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", None),
        ({"prompt": "x", "logit_bias": {"": None}}, "logit_bias", None),
        ({"prompt": "x", "logit_bias": {"1": 1e39}}, "logit_bias", None),
        ({"prompt": "x", "logit_bias": {"1": "much"}}, "logit_bias", None),
        ({"prompt": "x", "logprobs": 21}, "logprobs", None),
        ({"prompt": "x", "logprobs": True}, "logprobs", None),
        ({"prompt": "x", "speculative": 3}, "speculative", None),
        ({"prompt": "x", "speculative": {"max": 99}}, "speculative", None),
        (
            {"prompt": "x", "speculative": {"mode": "ngram"}},
            "speculative.mode",
            "unsupported_parameter",
        ),
        ({"prompt": "x", "n": 2, "best_of": 3}, "best_of", None),
        ({"prompt": "x", "guided_regex": "a", "regex": "a"}, "response_format", None),
        ({"prompt": "x", "temperature": 1e-46}, "temperature", None),
        ({"prompt": "x", "temperature": 1e300}, "temperature", None),
        ({"prompt": "x", "top_p": 1e-46}, "top_p", None),
        ({"prompt": "x", "presence_penalty": -1e39}, "presence_penalty", None),
        ({"prompt": "x", "tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        *(
            ({"prompt": "x", name: value}, name, "unsupported_parameter")
            for name, value in {
                "min_tokens": 3,
                "stop_token_ids": [5],
                "bad_words": ["a"],
                "skip_special_tokens": False,
                "include_stop_str_in_output": True,
                "add_special_tokens": False,
                "repetition_context_size": 20,
                "n_predict": 5,
                "adapters": "my/lora",
            }.items()
        ),
    ],
    ids=repr,
)
def test_what_is_wrong_is_told_by_name(
    client: TestClient, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    answer = client.post(COMPLETIONS, content=json.dumps(body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("more", [{}, {"echo": True}])
def test_ids_that_only_padding_has_are_refused(
    llama: tuple[Path, Path], tmp_path: Path, more: dict[str, Any]
) -> None:
    """The logits are wider than the tokenizer, as those of many models are."""
    directory = make_llama(tmp_path, padding=32)
    with running((directory, llama[1]), replace(OPTIONS, proposer="draft")) as engine:
        client, size = client_of(engine), engine.pair.tokenizer.size
        assert engine.pair.target.vocabulary == size + 32
        for prompt in ([size - 1, size], [-1], [size + 5]):
            answer = client.post(COMPLETIONS, json={"prompt": prompt, **more})
            assert answer.status_code == 400, answer.text
            assert f"must be a token id below {size}" in answer.json()["error"]["message"]
        assert client.post("/detokenize", json={"tokens": [size]}).status_code == 400
        # Nothing can come of a bias of theirs.
        ok(client, COMPLETIONS, prompt="x", max_tokens=1, logit_bias={f"{size}": 1})
        ok(client, COMPLETIONS, prompt=[size - 1], max_tokens=3, **more)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_body_that_is_no_object_is_told_so(client: TestClient, content: bytes) -> None:
    answer = client.post(COMPLETIONS, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [{"role": "user"}],
        [{"role": "king", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ["x"],
    ],
    ids=repr,
)
def test_messages_that_are_none_are_told_so(client: TestClient, messages: object) -> None:
    answer = client.post(CHAT, json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_fields_that_change_nothing_are_taken(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 4}
    plain = ok(client, COMPLETIONS, **body)["choices"]
    more = {
        "user": "me",
        "n": None,
        "tools": None,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "nobody knows this": {},
        "stream_options": {"include_usage": None},
        "speculative": {"max": None},
        "ignore_eos": False,
        "min_tokens": 0,
        "stop_token_ids": [],
        "add_special_tokens": True,
        "skip_special_tokens": True,
        "repeat_penalty": 1.0,
        "mirostat": 0,
        "top_k": -1,
        "min_p": 1e-46,
        "frequency_penalty": 1e-46,
        "logit_bias": {"99999999": 5},
        "best_of": 1,
        "functions": [],
        "function_call": "auto",
    }
    assert ok(client, COMPLETIONS, **body, **more)["choices"] == plain


def test_another_model_is_not_found_and_not_loaded(client: TestClient, engine: Engine) -> None:
    service = Service(engine, "tiny", ServiceSettings(strict_model=True))
    strict = TestClient(make_app(service, OPEN), raise_server_exceptions=False)
    for path, body in (
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": []}),
        ("/v1/messages", {"messages": []}),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = strict.post(path, json={**body, "model": "../../etc"})
        assert answer.status_code == 404
    assert client.post(COMPLETIONS, json={"prompt": "x", "model": 5}).status_code == 400
    answer = strict.post(COMPLETIONS, json={"prompt": "x", "model": 5})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert ok(strict, COMPLETIONS, prompt="x", max_tokens=1, model="tiny")["model"] == "tiny"
    answer = client.get("/v1/models/other")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["", "tgi", "gpt-4o"])
def test_any_name_is_answered_by_the_one_model(client: TestClient, name: str) -> None:
    told = ok(client, COMPLETIONS, prompt="x", max_tokens=1, model=name)
    assert told["model"] == "tiny"


def test_more_choices_than_an_engine_takes_are_not_to_be_tried_again(engine: Engine) -> None:
    client = client_of(engine, Limits(waiting=0))
    assert client.get("/props").json()["limits"]["choices"] == 4
    answer = client.post(COMPLETIONS, json={"prompt": TEXT, "n": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


def test_the_model_is_listed(client: TestClient) -> None:
    told = client.get("/v1/models").json()
    [model] = told["data"]
    assert told["object"] == "list"
    assert (model["id"], model["object"]) == ("tiny", "model")
    assert client.get("/v1/models/tiny").json() == model


def test_tokens_and_texts(client: TestClient, pair: Pair) -> None:
    ids = pair.tokenizer.encode("déjà vu")
    for body in ({"content": "déjà vu"}, {"prompt": "déjà vu"}):
        told = ok(client, "/tokenize", **body)
        assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 4096)
    messages = [{"role": "user", "content": "a"}]
    told = ok(client, "/tokenize", messages=messages)
    assert told["tokens"] == pair.tokenizer.encode("USER: a\nASSISTANT:")
    assert ok(client, "/detokenize", tokens=ids)["content"] == "déjà vu"
    for wrong in ({}, {"content": "a", "prompt": "a"}, {"messages": messages, "content": 5}):
        assert client.post("/tokenize", json=wrong).status_code == 400
    for tokens in (None, "x", [1.5], [-1], [10**9]):
        assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_health_and_paths_that_are_none(client: TestClient) -> None:
    assert client.get("/health").json().items() >= {"status": "ok"}.items()
    for answer, status in ((client.get("/nothing"), 404), (client.get(CHAT), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = client.put("/")
    assert answer.json()["error"]["message"] == ("this path does not take PUT: use GET, HEAD, POST")


def test_health_is_that_texts_make_progress(
    engine: Engine, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": TEXT, "max_tokens": 3}
    for failed in range(1, 4):
        with broken_after(0, monkeypatch):
            assert client.post(COMPLETIONS, json=body).status_code == 500
        wait_until(lambda: engine.failures.passes == failed)  # noqa: B023
        told = client.get("/health")
        assert told.status_code == (503 if failed == 3 else 200)
    assert told.json()["error"]["code"] == "no_progress" and told.headers["retry-after"]
    ok(client, COMPLETIONS, **body)
    told = client.get("/health").json()
    assert (told["status"], told["last_failure"]) == ("ok", "ValueError")
    assert told["failures"] >= 3


def test_while_loading_there_is_nobody_to_ask() -> None:
    client = client_of(Engine(lambda: None, batch_size=1, waiting=1))
    for answer in (client.get("/health"), client.post(CHAT, json={})):
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "Loading model"
        assert answer.headers["retry-after"]
    assert client.get("/metrics").status_code == 200


def test_props_say_what_is_served(client: TestClient) -> None:
    told = client.get("/props").json()
    assert told["chat"] == "role prefixes"
    assert (told["total_slots"], told["n_ctx"], told["rule"]) == (4, 4096, "coupled")
    assert told["default_generation_settings"]["max_tokens"] == OPTIONS.max_tokens
    assert "/" not in told["model_alias"]


def test_figures_are_counted_under_both_families_of_names(llama: tuple[Path, Path]) -> None:
    with running(llama) as engine:
        client = client_of(engine)
        told = [ok(client, COMPLETIONS, prompt=TEXT, max_tokens=10 + each) for each in range(3)]
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[a-z0-9_:]+(\{[^}]*\})?", name) for name in values)
    labels = '{model_name="tiny",engine="0"}'
    drafted = sum(each["timings"]["draft_n"] for each in told)
    accepted = sum(each["timings"]["draft_n_accepted"] for each in told)
    prompts = sum(each["usage"]["prompt_tokens"] for each in told)
    for name, value in {
        "llamacpp:prompt_tokens_total": prompts,
        "llamacpp:tokens_predicted_total": 33,
        "llamacpp:spec_decode_num_draft_tokens_total": drafted,
        "llamacpp:spec_decode_num_accepted_tokens_total": accepted,
        "llamacpp:requests_processing": 0,
        f"vllm:generation_tokens_total{labels}": 33,
        f"vllm:spec_decode_num_draft_tokens_total{labels}": drafted,
        f"vllm:spec_decode_num_accepted_tokens_total{labels}": accepted,
        f"vllm:time_to_first_token_seconds_count{labels}": 3,
        f"vllm:e2e_request_latency_seconds_count{labels}": 3,
        'vllm:request_success_total{model_name="tiny",engine="0",finished_reason="length"}': 3,
    }.items():
        assert values[name] == str(value), name
    by_place = [name for name in values if name.startswith("llamacpp:") and "per_pos" in name]
    assert sum(int(values[name]) for name in by_place) == accepted
    assert len({line for line in lines if line.startswith("# TYPE")}) == len(
        [line for line in lines if line.startswith("# TYPE")]
    )


def test_a_full_queue_asks_to_come_again(llama: tuple[Path, Path]) -> None:
    with running(llama, batch_size=1, waiting=1) as engine:
        answer = client_of(engine).post(COMPLETIONS, json={"prompt": TEXT, "n": 3})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_request_whose_time_is_over_keeps_what_it_has(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ResponseStream._steps

    async def until_eight_tokens(self: ResponseStream, every: float = 3600.0) -> AsyncIterator[Any]:
        async for each in steps(self, every):
            yield each
            if sum(choice.tokens for choice in self.choices) >= 8:
                self._deadline = 0.0

    client = client_of(engine)
    body = {"prompt": TEXT, "max_tokens": 4000, "seed": 1, "temperature": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(ResponseStream, "_steps", until_eight_tokens)
        [choice] = ok(client, COMPLETIONS, **body)["choices"]
        assert choice["finish_reason"] == "length" and choice["text"]
        *_, last = streamed(client, COMPLETIONS, **body)
        assert last["choices"][0]["finish_reason"] == "length"
    answer = client_of(engine, Limits(seconds=0)).post(COMPLETIONS, json=body)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
    wait_until(lambda: engine.requests == (0, 0))


def test_a_request_that_never_fits_into_memory_is_told_what_would(
    llama: tuple[Path, Path],
) -> None:
    with running(llama) as engine:
        budget = 3 * engine.budget.of_caches([Extent(5, 5, 25)]) // 2
    with running(llama, memory_budget=budget) as engine:
        client = client_of(engine)
        answer = client.post(COMPLETIONS, json={"prompt": [5] * 5, "max_tokens": 400})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "max_tokens")
        assert error["code"] == "context_length_exceeded"
        most = int(
            re.search(r"ask for at most (\d+) tokens, or raise memory-budget", answer.text)[1]
        )
        assert ok(client, COMPLETIONS, prompt=[5] * 5, max_tokens=most)
        error = client.post(COMPLETIONS, json={"prompt": [5] * 300}).json()["error"]
        assert error["param"] == "prompt" and "300 tokens, which take" in error["message"]
        # One fits at a time, and the others wait.
        answers = ok(client, COMPLETIONS, prompt=[5] * 5, n=4, max_tokens=9)
        assert len(answers["choices"]) == 4
        wait_until(lambda: engine.reserved_bytes == 0)
        told = client.get("/metrics").text
        assert f"mlx_specdec:memory_budget_bytes {budget}" in told
        assert "mlx_specdec:memory_reserved_bytes 0" in told


def test_a_context_may_be_cut(engine: Engine) -> None:
    client = client_of(engine, Limits(context=20))
    assert client.get("/props").json()["n_ctx"] == 20
    told = ok(client, COMPLETIONS, prompt=[5] * 12)
    assert told["usage"]["completion_tokens"] == 8
    # What is asked for beyond it is as good as no limit.
    for most in (8, 9, 10**30, -1):
        again = ok(client, COMPLETIONS, prompt=[5] * 12, max_tokens=most)
        assert again["choices"] == told["choices"]
    assert told["choices"][0]["finish_reason"] == "length"
    answer = client.post(COMPLETIONS, json={"prompt": [5] * 20})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_fields_have_the_names_of_other_servers(client: TestClient, pair: Pair) -> None:
    body = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    ids = pair.tokenizer.encode(TEXT)
    for one, other in (
        ({"prompt": ids, "repetition_penalty": 2}, {"prompt": ids, "repeat_penalty": 2}),
        ({"prompt": ids[-3:]}, {"prompt": TEXT, "truncate_prompt_tokens": 3}),
        ({"prompt": ids, "top_k": 0}, {"prompt": ids, "top_k": -1}),
        ({"prompt": ids, "n": 2}, {"prompt": ids, "n": 2.0, "best_of": 2}),
    ):
        asked = [ok(client, COMPLETIONS, **{**body, **each}) for each in (one, other)]
        assert asked[0]["choices"] == asked[1]["choices"]


def test_a_body_that_is_too_large_is_refused(engine: Engine) -> None:
    client = client_of(engine, Limits(body_bytes=100))
    assert client.post(COMPLETIONS, json={"prompt": "x" * 200}).status_code == 413


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/props", "/nothing"])
def test_only_the_key_opens(engine: Engine, path: str) -> None:
    client = client_of(engine, access=Access("secret"))
    for headers in ({}, {"Authorization": "Bearer secre"}, {"x-api-key": "sécret"}):
        sent = {name: value.encode() for name, value in headers.items()}
        answer = client.get(path, headers=sent)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for headers in (KEY, {"authorization": "bearer secret"}, {"x-api-key": "secret"}):
        assert client.get(path, headers=headers).status_code != 401
    for ask in (client.get, client.head):
        assert ask("/health").status_code == ask("/").status_code == 200
    assert client.post("/", json={"inputs": TEXT}).status_code == 401


def test_a_key_may_have_letters_of_any_kind(engine: Engine) -> None:
    client = client_of(engine, access=Access("sécret"))
    for key, status in (("sécret", 200), ("sêcret", 401)):
        for headers in ({"x-api-key": key.encode()}, {"Authorization": f"Bearer {key}".encode()}):
            assert client.get("/v1/models", headers=headers).status_code == status


def test_pages_of_others_may_not_ask(engine: Engine) -> None:
    foreign = {"Origin": "https://evil.example"}
    client = client_of(engine)
    answer = client.post(COMPLETIONS, json={"prompt": TEXT}, headers=foreign)
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    # A name that somebody made point here.
    rebound = {"Origin": "http://evil.example:8080", "Host": "evil.example:8080"}
    assert client.get("/v1/models", headers=rebound).status_code == 403
    assert client.get("/v1/models", headers={"Origin": "http://[evil"}).status_code == 403
    own = {"Origin": "http://localhost:8080", "Host": "localhost:8080"}
    assert client.get("/v1/models", headers=own).status_code == 200
    named = client_of(engine, access=Access("secret", ["https://evil.example"]))
    answer = named.get("/v1/models", headers={**foreign, **KEY})
    assert answer.headers["access-control-allow-origin"] == "https://evil.example"
    preflight = {**foreign, "Access-Control-Request-Method": "POST"}
    assert named.options(CHAT, headers=preflight).status_code == 200
    assert named.get("/v1/models", headers={"Origin": "https://other.example"}).status_code == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("192.168.1.2:8080", 200),
        ("MyMachine:8080", 200),
        ("app.localhost", 200),
        ("host.docker.internal:8080", 200),
        ("their.example", 200),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("internal", 403),
        ("[evil", 403),
    ],
)
def test_a_name_that_somebody_made_point_here_is_refused(
    engine: Engine, host: str, status: int
) -> None:
    access = Access(origins=["https://their.example"], loopback_name="mymachine")
    for path in ("/v1/models", "/health", "/"):
        answer = client_of(engine, access=access).get(path, headers={"Host": host})
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "host_not_allowed"
    # On another address, and for pages of any origin, every name is as good.
    for access in (Access(), Access(origins=["*"], loopback_name="mymachine")):
        assert client_of(engine, access=access).get("/", headers={"Host": host}).status_code == 200


def test_nobody_waits_where_an_engine_has_failed(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(llama, batch_size=1) as engine, broken_after(2, monkeypatch):
        answer = client_of(engine).post(COMPLETIONS, json={"prompt": [TEXT] * 3, "max_tokens": 9})
        assert answer.status_code == 500
        assert engine.requests == (0, 0)


def test_an_engine_that_fails_tells_so_in_a_chunk_and_no_more(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": TEXT, "max_tokens": 200}
    with broken_after(5, monkeypatch):
        answer = client.post(COMPLETIONS, json={**body, "stream": True})
        assert answer.status_code == 200
        *events, rest = answer.text.split("\n\n")
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and len(events) > 1 and rest == ""
    with broken_after(5, monkeypatch):
        answer = client.post(COMPLETIONS, json=body)
        assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
        assert "/" not in answer.text.replace("\\/", "")
    assert ok(client, COMPLETIONS, **body)


def test_a_handler_that_fails_shows_no_path(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Service, request: object) -> None:
        raise ValueError("/a/path/of/ours")

    monkeypatch.setattr(Service, "parser", broken)
    with caplog.at_level("INFO", "mlx_specdec.serve.app"):
        answer = client.post(CHAT, json={})
    assert [f"path={CHAT} status=500" in line for line in caplog.messages] == [True]
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "something went wrong here"


def test_a_chat_template_is_used_where_there_is_one(templated: tuple[Path, None]) -> None:
    options = replace(OPTIONS, num_draft="auto", system_prompt="Hush.")
    with running(templated, options) as engine:
        client = client_of(engine)
        assert client.get("/props").json()["chat"] == "template"
        for messages, prompt in (
            ([{"role": "user", "content": "a"}], "[system] Hush.\n[user] a\n[assistant]"),
            (
                [{"role": "system", "content": "Own."}, {"role": "user", "content": "a"}],
                "[system] Own.\n[user] a\n[assistant]",
            ),
        ):
            told = ok(client, "/tokenize", messages=messages)
            assert ok(client, "/detokenize", tokens=told["tokens"])["content"] == prompt
            chat = ok(client, CHAT, messages=messages, temperature=0)
            raw = ok(client, COMPLETIONS, prompt=told["tokens"], temperature=0)
            assert chat["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
            calm = {"messages": messages, "chat_template_kwargs": {"calm": "yes"}}
            assert ok(client, CHAT, **calm)["usage"]["prompt_tokens"] > told["count"]
        begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It "}]
        for more, prompt in (
            ({}, "[system] Hush.\n[user] a\n[assistant] It \n[assistant]"),
            ({"add_generation_prompt": False}, "[system] Hush.\n[user] a\n[assistant] It \n"),
            ({"continue_final_message": True}, "[system] Hush.\n[user] a\n[assistant] It "),
        ):
            told = ok(client, "/tokenize", messages=begun, **more)
            assert ok(client, "/detokenize", tokens=told["tokens"])["content"] == prompt
        answer = client.post(CHAT, json={**calm, "chat_template_kwargs": {"tokenize": False}})
        assert answer.status_code == 400


def test_a_task_prefix_is_left_out_where_no_template_is_wanted(t5: tuple[Path, Path]) -> None:
    pair = replace(load(t5[0]), task_prefix="les: ")
    for wanted, prompt in ((True, "les: pâtes"), (False, "pâtes")):
        options = replace(OPTIONS, chat_template=wanted)
        parser = RequestParser(pair, options, ServiceSettings(), "tiny")
        ids = pair.tokenizer.encode(prompt)
        assert parser.text_ids("pâtes") == ids
        assert parser.chat_ids({"messages": [{"role": "user", "content": "pâtes"}]}) == ids


def test_a_translator_answers_a_single_message(t5: tuple[Path, Path]) -> None:
    with running(t5) as engine:
        client = client_of(engine)
        props = client.get("/props").json()
        assert (props["chat"], props["task_prefix"]) == ("single user message", "")
        user = {"role": "user", "content": "les pâtes"}
        chat = ok(client, CHAT, messages=[user], temperature=0.7, seed=3)
        told = ok(client, COMPLETIONS, prompt="les pâtes", temperature=0.7, seed=3)
        text = told["choices"][0]["text"]
        assert chat["choices"][0]["message"]["content"] == text
        plain = {"speculative": False, "temperature": 0.7, "seed": 3}
        assert ok(client, COMPLETIONS, prompt="les pâtes", **plain)["choices"][0]["text"] == text
        answer = client.post(CHAT, json={"messages": [user, user]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
        told = client.post(COMPLETIONS, json={"prompt": [5] * 5000}).json()
        assert told["error"]["code"] == "context_length_exceeded"


def test_the_prompt_stands_before_the_text_for_those_who_want_it(
    client: TestClient, pair: Pair
) -> None:
    body = {"max_tokens": 9, "seed": 3, "temperature": 0.8}
    text = ok(client, COMPLETIONS, prompt=TEXT, **body)["choices"][0]["text"]
    for prompt in (TEXT, pair.tokenizer.encode(TEXT)):
        told = ok(client, COMPLETIONS, prompt=prompt, **body, echo=True)
        assert told["choices"][0]["text"] == TEXT + text
        assert told["usage"]["completion_tokens"] == 9
    both = [TEXT, "é"]
    told = ok(client, COMPLETIONS, prompt=both, **body, echo=True, n=2)["choices"]
    plain = ok(client, COMPLETIONS, prompt=both, **body, n=2)["choices"]
    assert [each["text"] for each in told] == [
        prompt + each["text"] for prompt, each in zip([TEXT, TEXT, "é", "é"], plain, strict=True)
    ]
    chunks = streamed(client, COMPLETIONS, prompt=TEXT, **body, echo=True)
    assert "".join(each["choices"][0]["text"] for each in chunks) == TEXT + text
    for wrong, param in (({"echo": True, "logprobs": 1}, "echo"), ({"echo": "yes"}, "echo")):
        answer = client.post(COMPLETIONS, json={"prompt": TEXT, **wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_tells_what_was_drafted_to_those_who_ask(client: TestClient, path: str) -> None:
    body = {"max_tokens": 40, "seed": 3, "temperature": 0.6, "logprobs": path == CHAT or 0}
    asked = {"messages": [{"role": "user", "content": TEXT}]} if path == CHAT else {"prompt": TEXT}
    plain = streamed(client, path, **asked, **body)
    told = streamed(client, path, **asked, **body, stream_options={"include_drafted": True})

    def text(chunks: list[dict[str, Any]]) -> str:
        choices = [each["choices"][0] for each in chunks]
        return "".join(
            each.get("text") or each.get("delta", {}).get("content", "") for each in choices
        )

    assert text(told) == text(plain) != ""
    assert not any("drafted" in each["choices"][0] for each in plain)
    choices = [each["choices"][0] for each in told if "drafted" in each["choices"][0]]
    assert sum(each["tokens"] for each in choices) == 40
    accepted = sum(each["tokens"] for each in choices if each["drafted"])
    timings = told[-1]["timings"]
    assert accepted == timings["draft_n_accepted"] > 0
    logprobs = [each["logprobs"] for each in choices if each["logprobs"]]
    assert sum(len(each.get("content") or each.get("tokens")) for each in logprobs) == 40
    silent = streamed(
        client, path, **asked, **body, speculative=False, stream_options={"include_drafted": True}
    )
    assert text(silent) == text(plain)
    assert not any(each["choices"][0].get("drafted") for each in silent)


def test_the_page_is_one_file_and_asks_this_server_alone(engine: Engine) -> None:
    client = client_of(engine, access=Access("secret"))
    answer = client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert "://" not in answer.text
    assert client.post("/", json={"inputs": TEXT}).status_code == 401
    # Of an address nobody can make a name.
    own = {"Origin": "http://192.168.1.5:8080", "Host": "192.168.1.5:8080"}
    assert client.get("/v1/models", headers={**own, **KEY}).status_code == 200


def test_what_is_described_is_there(client: TestClient) -> None:
    told = client.get("/openapi.json").json()
    paths = {route.path.replace(":path", "") for route in client.app.routes}
    assert told["paths"].keys() == paths
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(told))
    assert {*references} == told["components"]["schemas"].keys()
