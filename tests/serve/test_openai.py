"""Chat and text completions as OpenAI's clients read them, without a socket."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from starlette.testclient import TestClient

from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.options import Options
from mlx_specdec.serve.answers import server_sent_event
from mlx_specdec.serve.requests import RequestParser
from mlx_specdec.serve.settings import ServiceSettings
from mlx_specdec.text.tokenizer import load_tokenizer
from mlx_specdec.text.vocabulary import token_bytes

from ..support import tiny
from ..support.models import make_llama
from ..support.serving import (
    CHAT,
    COMPLETIONS,
    OPTIONS,
    TEMPLATE,
    TEXT,
    client_of,
    ok,
    running,
    streamed,
    user,
)
from ..support.tokenizers import unigram


def test_a_completion_has_what_clients_read(
    client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0.8, "seed": 5}
    answer = ok(client, COMPLETIONS, model="tiny", **body)
    ids = pair.tokenizer.encode(TEXT)
    [choice] = answer["choices"]
    text = alone(ids, max_tokens=12, temperature=0.8, seed=5)
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny" and isinstance(answer["created"], int)
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 12,
        "total_tokens": len(ids) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    timings = answer["timings"]
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
    answer = ok(client, CHAT, messages=messages, max_completion_tokens=9, temperature=0)
    prompt = "ASSISTANT's RULE: Be short.\nUSER: a\nb\nASSISTANT: c\nUSER: d\nASSISTANT:"
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": alone(pair.tokenizer.encode(prompt), max_tokens=9),
        "refusal": None,
        "annotations": [],
    }
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")


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
    answer = {"type": "x", "text": "é\x85日\u2028😀\u2029"}
    name, data, end = server_sent_event(answer, named=True).decode().splitlines()
    assert (name, end) == ("event: x", "")
    assert json.loads(data.removeprefix("data: ")) == answer


def test_choices_have_seeds_one_after_the_other(client: TestClient) -> None:
    body = {"prompt": TEXT, "temperature": 1.0, "max_tokens": 10}
    answer = ok(client, COMPLETIONS, **body, seed=7, n=3)
    alone = [ok(client, COMPLETIONS, **body, seed=7 + each) for each in range(3)]
    assert [each["text"] for each in answer["choices"]] == [
        each["choices"][0]["text"] for each in alone
    ]
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    pieces = dict.fromkeys(range(3), "")
    for chunk in streamed(client, COMPLETIONS, **body, seed=7, n=3):
        pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(pieces.values()) == [each["text"] for each in answer["choices"]]


def test_without_a_seed_texts_differ(client: TestClient) -> None:
    body = {"prompt": TEXT, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    texts = {ok(client, COMPLETIONS, **body)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_speculation_can_be_left_out_and_the_text_stays(
    client: TestClient, temperature: float
) -> None:
    body = {"prompt": TEXT, "temperature": temperature, "seed": 1, "max_tokens": 20}
    answer = [
        ok(client, COMPLETIONS, **body, **more)
        for more in ({}, {"speculative": True}, {"speculative": {"max": 1}})
    ]
    plain = [ok(client, COMPLETIONS, **body, speculative=off) for off in (False, {"max": 0})]
    assert len({each["choices"][0]["text"] for each in (*answer, *plain)}) == 1
    assert all(each["timings"]["draft_n"] > 0 for each in answer)
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
        "right": [{"type": "text", "text": text}],
        "edited": edited,
        "wrong": "0 1 2 3 4 5 6 7 8 9",
        "empty": "",
    }.items():
        answer = ok(client, COMPLETIONS, **body, prediction={"type": "content", "content": content})
        assert answer["choices"][0]["text"] == text, name
        counts[name] = answer["usage"]["completion_tokens_details"]
    accepted = {name: each["accepted_prediction_tokens"] for name, each in counts.items()}
    assert accepted["right"] > accepted["edited"] > accepted["wrong"] == 0
    assert counts["wrong"]["rejected_prediction_tokens"] > 0
    assert counts["empty"]["rejected_prediction_tokens"] == 0


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
    answer = ok(client, COMPLETIONS, prompt=ids, **body, logprobs=3)["choices"][0]
    logprobs = answer["logprobs"]
    options = Options(max_tokens=12, temperature=temperature, seed=1, frequency_penalty=0.5)
    tokens = list(generate(pair, ids, replace(options, regular=True, cost_cache=False)).tokens)
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
    # A character of several tokens counts at the first one, and special tokens are not printed.
    begun = [
        0 if token in pair.tokenizer.special_ids else sum(byte & 0xC0 != 0x80 for byte in piece)
        for token, piece in ((token, pieces[token]) for token in tokens)
    ]
    assert logprobs["text_offset"] == [sum(begun[:at]) for at in range(12)]
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
    answer = ok(client, CHAT, **body, top_logprobs=2)["choices"][0]
    entries = answer["logprobs"]["content"]
    assert len(entries) == 8
    for each in entries:
        assert bytes(each["bytes"]).decode("utf-8", "replace") == each["token"]
        assert each["logprob"] <= each["top_logprobs"][0]["logprob"] <= 0
        assert len(each["top_logprobs"]) == 2
    text = b"".join(bytes(each["bytes"]) for each in entries).decode("utf-8", "replace")
    assert text == answer["message"]["content"]
    assert ok(client, CHAT, **body)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    for wrong in ({"logprobs": 1}, {"logprobs": False, "top_logprobs": 2}, {"top_logprobs": 21}):
        assert client.post(CHAT, json={**body, **wrong}).status_code == 400


def test_the_token_that_ends_a_chat_has_no_logprob(client: TestClient, pair: Pair) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "regex": "a"}
    answer = ok(client, CHAT, **body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entries] == ["a"]
    for more in ({}, {"stream_options": {"include_drafted": True}}):
        choices = [each["choices"][0] for each in streamed(client, CHAT, **body, **more)]
        answer = [
            one for each in choices if each["logprobs"] for one in each["logprobs"]["content"]
        ]
        assert [each["token"] for each in answer] == ["a"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_all_but_the_last_chunk_say_that_usage_is_still_to_come(
    client: TestClient, path: str
) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [user("x")]}
    body = {**prompt, "max_tokens": 4}
    *chunks, last = streamed(client, path, **body, stream_options={"include_usage": True})
    assert chunks and all(each["usage"] is None for each in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    for more in ({}, {"stream_options": {}}):
        chunks = streamed(client, path, **body, **more)
        assert all("usage" not in each and each["choices"] for each in chunks)


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
        answer = ok(client, COMPLETIONS, prompt=ids, logit_bias=bias, **most, **more)
        assert answer["choices"][0]["finish_reason"] == "stop"
        answer = ok(
            client, COMPLETIONS, prompt=ids, logit_bias=bias, **most, **more, ignore_eos=True
        )
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted.text, "length")
        assert answer["usage"]["completion_tokens"] == 20


def test_biases_ban_and_force(client: TestClient, pair: Pair) -> None:
    [token] = pair.tokenizer.encode("x")[1:]
    answer = ok(client, COMPLETIONS, prompt=TEXT, max_tokens=4, logit_bias={str(token): 1000})
    assert answer["choices"][0]["text"] == "xxxx"
    ids = pair.tokenizer.encode(TEXT)
    single = ok(client, COMPLETIONS, prompt=ids)["choices"][0]["text"]
    answer = ok(client, COMPLETIONS, prompt=[TEXT, "naïve", TEXT])["choices"]
    assert [each["text"] == single for each in answer] == [True, False, True]


WRONG: dict[str, Sequence[Any]] = {
    "prompt": [
        {},
        *({"prompt": each} for each in ("", [], 5, [[1], 2], [10**9])),
        {"prompt": ["x"] * 9, "n": 2},
    ],
    "messages": [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
    "model": [5],
    "n": [0, 17],
    "stream": [1],
    "stream_options": [[]],
    "temperature": [-1, True, "hot", 1e-46, 1e300],
    "top_p": [1.5, 1e-46],
    "top_k": [1.5],
    "seed": [1.5, 2**70],
    "max_tokens": [-2, 1.5],
    "stop": [5, ["a"] * 17, "a" * 2000],
    "logit_bias": [{"a": 1}, {"": None}, {"1": 1e39}, {"1": "much"}],
    "logprobs": [21, True],
    "speculative": [3, {"max": 99}],
    "presence_penalty": [-1e39],
    "prediction": [{"type": "guess"}],
    "target_lang": [
        *({"prompt": each, "target_lang": "fr"} for each in ("x", [5, 9], ["x", "y"])),
        {"messages": [user("x")], "target_lang": "fr"},
    ],
    "source_lang": ["fr"],
    "echo": ["yes"],
    "best_of": [{"prompt": "x", "n": 2, "best_of": 3}],
    "response_format": [{"prompt": "x", "guided_regex": "a", "regex": "a"}],
}
"""Wrong values, or complete bodies, by the field that the error names."""
UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "min_tokens": 3,
    "stop_token_ids": [5],
    "bad_words": ["a"],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "use_beam_search": 1,
    "add_special_tokens": False,
    "repetition_context_size": 20,
    "n_predict": 5,
    "adapters": "my/lora",
}
WHOLE = {"prompt", "messages", "best_of", "response_format", "target_lang"}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        *(
            (each if param in WHOLE else {"prompt": "x", param: each}, param, None)
            for param, values in WRONG.items()
            for each in values
        ),
        *(
            ({"prompt": "x", name: value}, name, "unsupported_parameter")
            for name, value in UNSUPPORTED.items()
        ),
        ({"prompt": [7] * 4096}, "prompt", "context_length_exceeded"),
        (
            {"prompt": "x", "speculative": {"mode": "ngram"}},
            "speculative.mode",
            "unsupported_parameter",
        ),
    ],
    ids=lambda each: repr(each)[:60],
)
def test_what_is_wrong_is_reported_by_name(
    client: TestClient, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    answer = client.post(path, content=json.dumps(body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"] and "\n" not in error["message"]


def test_a_top_p_of_0_leaves_the_likeliest_token_alone(
    client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    greedy = alone(pair.tokenizer.encode(TEXT), max_tokens=15)
    body = {"temperature": 1.5, "seed": 7, "top_p": 0, "max_tokens": 15}
    assert ok(client, COMPLETIONS, prompt=TEXT, **body)["choices"][0]["text"] == greedy
    given = {"temperature": 1.5, "seed": 7, "top_p": 0.0, "max_new_tokens": 15}
    answer = ok(client, "/generate", inputs=TEXT, parameters=given)
    assert answer["generated_text"] == greedy


@pytest.mark.parametrize("stop", ["", [""], ["", "#"]])
def test_an_empty_stop_string_is_ignored(client: TestClient, stop: str | list[str]) -> None:
    body = {"prompt": TEXT, "max_tokens": 15}
    without = ok(client, COMPLETIONS, **body, stop=[each for each in stop if each])
    assert ok(client, COMPLETIONS, **body, stop=stop)["choices"] == without["choices"]


def test_ids_that_only_padding_has_are_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """The logits are wider than the tokenizer, as those of many models are."""
    directory = make_llama(tmp_path, padding=32)
    with running((directory, llama[1]), replace(OPTIONS, proposer="draft")) as engine:
        client, size = client_of(engine), engine.pair.tokenizer.size
        assert engine.pair.target.vocabulary == size + 32
        for prompt in ([size - 1, size], [-1], [size + 5]):
            answer = client.post(COMPLETIONS, json={"prompt": prompt, "echo": True})
            assert answer.status_code == 400, answer.text
            assert f"must be a token id below {size}" in answer.json()["error"]["message"]
        assert client.post("/detokenize", json={"tokens": [size]}).status_code == 400
        # A bias of such an id has no effect.
        ok(client, COMPLETIONS, prompt="x", max_tokens=1, logit_bias={f"{size}": 1})
        ok(client, COMPLETIONS, prompt=[size - 1], max_tokens=3, echo=True)


def test_fields_that_change_nothing_are_taken(client: TestClient) -> None:
    body = {"prompt": TEXT, "max_tokens": 4}
    plain = ok(client, COMPLETIONS, **body)["choices"]
    more = {
        "user": "me",
        "tools": None,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "nobody knows this": {},
        "stream_options": {"include_usage": None},
        "stop_token_ids": [],
        "typical_p": 1.0,
        "add_special_tokens": True,
        "top_k": -1,
        "min_p": 1e-46,
        "logit_bias": {"99999999": 5},
        "best_of": 1,
    }
    assert ok(client, COMPLETIONS, **body, **more)["choices"] == plain


def test_fields_have_the_names_of_other_servers(client: TestClient, pair: Pair) -> None:
    body = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    ids = pair.tokenizer.encode(TEXT)
    for one, other in (
        ({"prompt": ids, "repetition_penalty": 2}, {"prompt": ids, "repeat_penalty": 2}),
        ({"prompt": ids[-3:]}, {"prompt": TEXT, "truncate_prompt_tokens": 3}),
        ({"prompt": ids, "top_k": 0}, {"prompt": ids, "top_k": -1}),
        ({"prompt": ids, "n": 2}, {"prompt": ids, "n": 2.0, "best_of": 2}),
    ):
        request = [ok(client, COMPLETIONS, **{**body, **each}) for each in (one, other)]
        assert request[0]["choices"] == request[1]["choices"]


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
            reply = ok(client, "/tokenize", messages=messages)
            assert ok(client, "/detokenize", tokens=reply["tokens"])["content"] == prompt
            chat = ok(client, CHAT, messages=messages, temperature=0)
            raw = ok(client, COMPLETIONS, prompt=reply["tokens"], temperature=0)
            assert chat["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
            calm = {"messages": messages, "chat_template_kwargs": {"calm": "yes"}}
            assert ok(client, CHAT, **calm)["usage"]["prompt_tokens"] > reply["count"]
        begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It "}]
        for more, prompt in (
            ({}, "[system] Hush.\n[user] a\n[assistant] It \n[assistant]"),
            ({"add_generation_prompt": False}, "[system] Hush.\n[user] a\n[assistant] It \n"),
            ({"continue_final_message": True}, "[system] Hush.\n[user] a\n[assistant] It "),
        ):
            reply = ok(client, "/tokenize", messages=begun, **more)
            assert ok(client, "/detokenize", tokens=reply["tokens"])["content"] == prompt
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
        reply = ok(client, COMPLETIONS, prompt="les pâtes", temperature=0.7, seed=3)
        text = reply["choices"][0]["text"]
        assert chat["choices"][0]["message"]["content"] == text
        plain = {"speculative": False, "temperature": 0.7, "seed": 3}
        assert ok(client, COMPLETIONS, prompt="les pâtes", **plain)["choices"][0]["text"] == text
        answer = client.post(CHAT, json={"messages": [user, user]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
        reply = client.post(COMPLETIONS, json={"prompt": [5] * 5000}).json()
        assert reply["error"]["code"] == "context_length_exceeded"


FAST = "PreTrainedTokenizerFast"


def test_the_blank_before_a_continuation_is_part_of_it(tmp_path: Path) -> None:
    """The tokenizer writes blanks as parts of words, and leaves out that of the first one."""
    unigram(tmp_path, chat_template=TEMPLATE, eos_token="</s>", tokenizer_class=FAST)
    size = load_tokenizer(tmp_path, kind="decoder-only").size
    tiny.write("llama", tmp_path, 0, vocab_size=size)
    with running((tmp_path, None)) as engine:
        client, word = client_of(engine), engine.pair.tokenizer.pieces().index("▁des")
        body = {"max_tokens": 2, "logit_bias": {f"{word}": 100}}
        answers = [
            ok(client, COMPLETIONS, prompt="Les", echo=True, **body),
            ok(client, COMPLETIONS, prompt=["Les", "Les"], **body),
        ]
        texts = [each["text"] for answer in answers for each in answer["choices"]]
        assert texts == ["Les des des", " des des", " des des"]
        chunks = streamed(client, COMPLETIONS, prompt="Les", **body)
        assert "".join(each["choices"][0]["text"] for each in chunks) == " des des"
        # An answer, and a text that fits a pattern, stand alone.
        message = ok(client, CHAT, messages=[user("Les")], **body)["choices"][0]["message"]
        assert message["content"] == "des des"
        reply = ok(client, COMPLETIONS, prompt="Les", regex="des( des)*", **body)
        assert reply["choices"][0]["text"] == "des des"
        begun = [user("Les"), {"role": "assistant", "content": "Les"}]
        reply = ok(client, CHAT, messages=begun, continue_final_message=True, **body)
        assert reply["choices"][0]["message"]["content"] == " des des"
        options = replace(OPTIONS, max_tokens=2, logit_bias={word: 100.0})
        pair = load(tmp_path, None)
        assert generate(pair, "Les", replace(options, chat_template=False)).text == " des des"
        assert generate(pair, "Les", options).text == "des des"


def test_the_prompt_stands_before_the_text_for_those_who_want_it(
    client: TestClient, pair: Pair
) -> None:
    body = {"max_tokens": 9, "seed": 3, "temperature": 0.8}
    text = ok(client, COMPLETIONS, prompt=TEXT, **body)["choices"][0]["text"]
    reply = ok(client, COMPLETIONS, prompt=pair.tokenizer.encode(TEXT), **body, echo=True)
    assert reply["choices"][0]["text"] == TEXT + text
    assert reply["usage"]["completion_tokens"] == 9
    both = [TEXT, "é"]
    reply = ok(client, COMPLETIONS, prompt=both, **body, echo=True, n=2)["choices"]
    plain = ok(client, COMPLETIONS, prompt=both, **body, n=2)["choices"]
    assert [each["text"] for each in reply] == [
        prompt + each["text"] for prompt, each in zip([TEXT, TEXT, "é", "é"], plain, strict=True)
    ]
    chunks = streamed(client, COMPLETIONS, prompt=TEXT, **body, echo=True)
    assert "".join(each["choices"][0]["text"] for each in chunks) == TEXT + text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_tells_what_was_drafted_to_those_who_ask(client: TestClient, path: str) -> None:
    body = {"max_tokens": 40, "seed": 3, "temperature": 0.6, "logprobs": path == CHAT or 0}
    request = (
        {"messages": [{"role": "user", "content": TEXT}]} if path == CHAT else {"prompt": TEXT}
    )
    plain = streamed(client, path, **request, **body)
    answer = streamed(client, path, **request, **body, stream_options={"include_drafted": True})

    def text(chunks: list[dict[str, Any]]) -> str:
        choices = [each["choices"][0] for each in chunks]
        return "".join(
            each.get("text") or each.get("delta", {}).get("content", "") for each in choices
        )

    assert text(answer) == text(plain) != ""
    assert not any("drafted" in each["choices"][0] for each in plain)
    choices = [each["choices"][0] for each in answer if "drafted" in each["choices"][0]]
    assert sum(each["tokens"] for each in choices) == 40
    accepted = sum(each["tokens"] for each in choices if each["drafted"])
    timings = answer[-1]["timings"]
    assert accepted == timings["draft_n_accepted"] > 0
    logprobs = [each["logprobs"] for each in choices if each["logprobs"]]
    assert sum(len(each.get("content") or each.get("tokens")) for each in logprobs) == 40
    silent = streamed(
        client, path, **request, **body, speculative=False, stream_options={"include_drafted": True}
    )
    assert text(silent) == text(plain)
    assert not any(each["choices"][0].get("drafted") for each in silent)
