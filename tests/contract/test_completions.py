"""Chat and text completions as OpenAI's clients read them."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from mlx_specdec import Options, generate, load

from .zoo import CHAT, COMPLETIONS, TEXT, USER, Model, joined

Models = Callable[[str], Model]
PATHS = (COMPLETIONS, CHAT)


@pytest.fixture(scope="module")
def tiny(models: Models) -> Model:
    return models("tiny")


@pytest.fixture(scope="module")
def alone(tiny: Model) -> Callable[..., Any]:
    """Decode a prompt plainly in this process, and return the result."""
    pair = load(tiny.path)

    def decoded(prompt: Any, **settings: Any) -> Any:
        options = {"max_tokens": 24, "cost_cache": False, **settings}
        return generate(pair, prompt, Options(regular=True, **options))

    return decoded


def asking(path: str, text: str = TEXT) -> dict[str, Any]:
    """Return a prompt in the format of an endpoint."""
    messages = [{"role": "user", "content": text}]
    return {"prompt": text} if path == COMPLETIONS else {"messages": messages}


def text_of(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
    )


def bytes_of(name: str) -> bytes:
    """Return the bytes of a token by its name in an answer."""
    if not name.startswith("bytes:"):
        return name.encode()
    return name[6:].encode().decode("unicode_escape").encode("latin-1")


def test_a_completion_has_what_clients_read(tiny: Model, alone: Callable[..., Any]) -> None:
    prompt, body = "A prompt of its own", {"max_tokens": 12, "temperature": 0.8, "seed": 5}
    # Without the token that begins all other prompts, nothing is cached.
    ids = tiny.ids(prompt)[1:]
    answer = tiny.ok(COMPLETIONS, prompt=ids, **body)
    [choice] = answer["choices"]
    text = alone(ids, **body).text
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


def test_a_chat_has_what_clients_read(tiny: Model, alone: Callable[..., Any]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    answer = tiny.ok(CHAT, messages=messages, max_completion_tokens=9, temperature=0)
    prompt = "ASSISTANT's RULE: Be short.\nUSER: a\nb\nASSISTANT: c\nUSER: d\nASSISTANT:"
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": alone(tiny.ids(prompt), max_tokens=9).text,
        "refusal": None,
        "annotations": [],
    }
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")


def test_a_stream_is_the_same_answer_in_pieces(tiny: Model) -> None:
    body = {**asking(CHAT), "max_tokens": 15, "temperature": 0.9, "seed": 2}
    whole = tiny.choice(CHAT, **body)["message"]["content"]
    first, *chunks, last = streamed = tiny.streamed(CHAT, **body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks)["content"] == whole and last["choices"][0]["delta"] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in streamed]
    assert reasons == [*[None] * (len(chunks) + 1), "length"]
    assert {chunk["object"] for chunk in streamed} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in streamed}) == 1
    assert last["timings"]["predicted_n"] == 15


@pytest.mark.parametrize("path", PATHS)
def test_only_the_last_chunk_has_usage(tiny: Model, path: str) -> None:
    body = {**asking(path), "max_tokens": 4}
    *chunks, last = tiny.streamed(path, **body, stream_options={"include_usage": True})
    assert chunks and all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    bodies: list[dict[str, Any]] = [{}, {"stream_options": {}}]
    for more in bodies:
        chunks = tiny.streamed(path, **body, **more)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_choices_have_consecutive_seeds(tiny: Model) -> None:
    body = {"prompt": TEXT, "temperature": 1.0, "max_tokens": 10}
    answer = tiny.ok(COMPLETIONS, **body, seed=7, n=3)
    texts = [tiny.written(**body, seed=seed) for seed in (7, 8, 9)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["usage"]["prompt_tokens"] == len(tiny.ids(TEXT))
    pieces = dict.fromkeys(range(3), "")
    for chunk in tiny.streamed(COMPLETIONS, **body, seed=7, n=3):
        pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(pieces.values()) == texts


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_drafts_can_be_turned_off_and_the_text_stays(tiny: Model, temperature: float) -> None:
    body = {"prompt": TEXT, "temperature": temperature, "seed": 1, "max_tokens": 12}
    drafted = [
        tiny.ok(COMPLETIONS, **body, **more)
        for more in ({}, {"speculative": True}, {"speculative": {"max": 1}})
    ]
    plain = [tiny.ok(COMPLETIONS, **body, speculative=off) for off in (False, {"max": 0})]
    assert len({answer["choices"][0]["text"] for answer in (*drafted, *plain)}) == 1
    assert all(answer["timings"]["draft_n"] > 0 for answer in drafted)
    assert not any("draft_n" in answer["timings"] for answer in plain)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_prediction_is_drafted_and_the_text_stays(tiny: Model, temperature: float) -> None:
    body = {"prompt": TEXT, "temperature": temperature, "seed": 1, "max_tokens": 40}
    text = tiny.written(**body)
    counts = {}
    for name, content in {
        "right": [{"type": "text", "text": text}],
        "edited": text[:10] + "!?" + text[14:],
        "half": text[: len(text) // 2],
        "wrong": "0 1 2 3 4 5 6 7 8 9",
        "empty": "",
    }.items():
        answer = tiny.ok(COMPLETIONS, **body, prediction={"type": "content", "content": content})
        assert answer["choices"][0]["text"] == text, name
        counts[name] = answer["usage"]["completion_tokens_details"]
    accepted = {name: count["accepted_prediction_tokens"] for name, count in counts.items()}
    assert accepted["right"] >= accepted["edited"] > accepted["half"] > accepted["wrong"] == 0
    assert counts["wrong"]["rejected_prediction_tokens"] > 0
    assert counts["empty"]["rejected_prediction_tokens"] == 0


def test_a_stop_string_ends_the_text_before_it(tiny: Model) -> None:
    body = {"prompt": TEXT, "max_tokens": 12}
    text = tiny.written(**body)
    stop = text[5:7]
    for stops in (stop, [stop], ["never seen", stop], ["", stop]):
        choice = tiny.choice(COMPLETIONS, **body, stop=stops)
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
    chunks = tiny.streamed(COMPLETIONS, **body, stop=stop)
    assert text_of(chunks) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    for stops in ("", [""]):
        assert tiny.written(**body, stop=stops) == text


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_logprobs_are_the_targets_own(
    tiny: Model, alone: Callable[..., Any], temperature: float
) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "temperature": temperature, "seed": 1}
    body["frequency_penalty"] = 0.5
    ids = tiny.ids(TEXT)
    asked = {"prompt": ids, **body, "logprobs": 3}
    choice = tiny.choice(COMPLETIONS, **asked)
    tokens = list(alone(ids, **body).tokens)
    model, tokenizer = mlx_lm.load(str(tiny.path))[:2]
    rows = model(mx.array([[*ids, *tokens]]))[0, len(ids) - 1 : -1]
    expected = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    own = [expected[at, token].item() for at, token in enumerate(tokens)]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx(own, abs=1e-3)
    best: Any = mx.sort(expected, axis=-1)[:, ::-1].tolist()
    for tops, values in zip(logprobs["top_logprobs"], best, strict=True):
        assert list(tops.values()) == pytest.approx(values[:3], abs=1e-3) and len(tops) == 3
    pieces = [bytes_of(name) for name in logprobs["tokens"]]
    assert [piece.decode("utf-8", "replace") for piece in pieces] == [
        tokenizer.decode([token]) for token in tokens
    ]
    # A character of several tokens counts at the first one, and special tokens are not printed.
    sizes = [
        0 if piece.startswith(b"<|") else sum(byte & 0xC0 != 0x80 for byte in piece)
        for piece in pieces
    ]
    assert logprobs["text_offset"] == [sum(sizes[:at]) for at in range(12)]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in tiny.streamed(COMPLETIONS, **asked)]
    for name, whole in logprobs.items():
        parts = [one for chunk in chunks if chunk for one in chunk[name]]
        if name == "token_logprobs":
            assert parts == pytest.approx(whole, abs=1e-3)
        elif name != "top_logprobs":
            assert parts == whole
    again = tiny.choice(COMPLETIONS, **{**asked, "logprobs": 0}, speculative=False)["logprobs"]
    assert again["token_logprobs"] == pytest.approx(own, abs=1e-3)
    assert again["top_logprobs"] == [{}] * 12


def test_logprobs_of_a_chat_have_bytes(tiny: Model) -> None:
    body = {**asking(CHAT, "é"), "logprobs": True, "max_tokens": 8}
    answer = tiny.choice(CHAT, **body, top_logprobs=2)
    entries = answer["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace")
    assert text == answer["message"]["content"]
    assert tiny.choice(CHAT, **body)["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_token_that_ends_a_chat_has_no_logprob(tiny: Model) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    body = {"messages": [USER], "logprobs": True, "regex": "a"}
    answer = tiny.ok(CHAT, **body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2
    entries = [answer["choices"][0]["logprobs"]["content"]]
    for more in ({}, {"stream_options": {"include_drafted": True}}):
        choices = [chunk["choices"][0] for chunk in tiny.streamed(CHAT, **body, **more)]
        parts = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        entries.append([entry for part in parts for entry in part])
    assert [[entry["token"] for entry in one] for one in entries] == [["a"]] * 3


def test_biases_force_and_prompts_of_a_list_are_answered_in_order(tiny: Model) -> None:
    bias = {str(tiny.ids("x")[-1]): 1000}
    assert tiny.written(prompt=TEXT, max_tokens=4, logit_bias=bias) == "xxxx"
    single = tiny.written(prompt=tiny.ids(TEXT), max_tokens=8)
    choices = tiny.ok(COMPLETIONS, prompt=[TEXT, "naïve", TEXT], max_tokens=8)["choices"]
    assert [choice["text"] == single for choice in choices] == [True, False, True]


def test_the_prompt_stands_before_the_text_with_echo(tiny: Model) -> None:
    body = {"max_tokens": 9, "seed": 3, "temperature": 0.8}
    text = tiny.written(prompt=TEXT, **body)
    answer = tiny.ok(COMPLETIONS, prompt=tiny.ids(TEXT), **body, echo=True)
    assert answer["choices"][0]["text"] == TEXT + text
    assert answer["usage"]["completion_tokens"] == 9
    both: dict[str, Any] = {"prompt": [TEXT, "é"], **body, "n": 2}
    echoed, plain = (tiny.ok(COMPLETIONS, **both, echo=echo)["choices"] for echo in (True, False))
    assert [choice["text"] for choice in echoed] == [
        prompt + choice["text"]
        for prompt, choice in zip([TEXT, TEXT, "é", "é"], plain, strict=True)
    ]
    assert text_of(tiny.streamed(COMPLETIONS, prompt=TEXT, **body, echo=True)) == TEXT + text


def test_an_event_is_one_line_for_everybody_who_splits_lines(tiny: Model) -> None:
    text = "é\x85d\u2028😀\u2029"
    events = tiny.ask(COMPLETIONS, prompt=text, max_tokens=1, echo=True, stream=True).events
    assert text_of(events).startswith(text)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
