"""Tools and thoughts over HTTP: asked for, called, streamed, and told back to the model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

from starlette.testclient import TestClient

from mlx_specdec.options import Options
from mlx_specdec.text.tool_formats import FORMATS

from ..support.serving import CHAT, COMPLETIONS, SCHEMA, client_of, ok, running, streamed
from ..support.tooled import ANTHROPIC, NAMED, TEMPLATE, TOOLS, function, make_tooled

RESPONSES = [{"type": "function", "name": "keep", "parameters": SCHEMA}]
USER = {"role": "user", "content": "Who?"}
ARGUMENTS = r'\{"name": "[a-z]{1,4}", "age": \d{1,2}\}'


def bound_to(text: str, special: bool) -> dict[str, str]:
    """A field that lets a text be nothing else."""
    parts = re.split(r"(</?(?:think|tool_call)>)", text)
    rules = [each if special and each[0] == "<" else json.dumps(each) for each in parts if each]
    return {"grammar": "start: " + " ".join(rules)}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def special(request: pytest.FixtureRequest) -> bool:
    """Whether the marks of the model are tokens that are never printed."""
    return request.param


@pytest.fixture(scope="module")
def client(special: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    directory = make_tooled(tmp_path_factory.mktemp("tooled"), special=special)
    with running((directory, None)) as engine:
        yield client_of(engine)


def deltas(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A message as a client puts it together from a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({**call, "function": dict(call["function"])})
            else:
                own = message["tool_calls"][call["index"]]["function"]
                own["arguments"] += call["function"]["arguments"]
    return message


def make_body(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 200, **more}


def test_thoughts_are_distinguished(client: TestClient, special: bool) -> None:
    body = make_body(**bound_to("<think>\nHm.\n</think>\n\nYes.", special))
    [choice] = ok(client, CHAT, **body)["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "annotations": [],
        "reasoning_content": "Hm.",
    }
    assert choice["finish_reason"] == "stop"
    answer = deltas(streamed(client, CHAT, **body))
    assert (answer["content"], answer["reasoning_content"]) == ("Yes.", "Hm.")


def test_a_prompt_may_leave_a_thought_open(client: TestClient) -> None:
    body = make_body(temperature=1.0, seed=3, max_tokens=15)
    ids = ok(client, "/tokenize", **make_body(chat_template_kwargs={"enable_thinking": True}))
    text = ok(client, COMPLETIONS, **{**body, "prompt": ids["tokens"]})["choices"][0]["text"]
    assert "<" not in text and text.strip()
    thinking = {**body, "chat_template_kwargs": {"enable_thinking": True}}
    message = ok(client, CHAT, **thinking)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (text.lstrip(), "")
    assert deltas(streamed(client, CHAT, **thinking))["reasoning_content"] == text.lstrip()
    # A pattern binds what comes after the thought.
    ended = ok(client, "/tokenize", content="</think>")["tokens"][-1]
    bias = {f"{ended}": 4}
    [choice] = ok(client, CHAT, **{**thinking, "max_tokens": 90}, regex="ab", logit_bias=bias)[
        "choices"
    ]
    assert choice["message"]["content"] == "ab" and choice["message"]["reasoning_content"]


OPENS = TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "<think>")
"""A template that opens a thought whatever the request wants."""
FITTING = [
    ({"regex": "ab[ab]{2}"}, "ab[ab]{2}"),
    ({"guided_json": SCHEMA}, ARGUMENTS),
    ({"grammar": 'start: "(" PART{1,3} ")"\nPART: /[ab]/'}, r"\([ab]{1,3}\)"),
    ({"grammar": 'root ::= "(" part{1,3} ")"\npart ::= "a"'}, r"\(a{1,3}\)"),
    ({"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False}, ""),
]


@pytest.fixture(scope="module")
def opening(
    special: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, str]]:
    """A model whose prompts open a thought, and the id of the token that closes it."""
    made = make_tooled(tmp_path_factory.mktemp("opens"), template=OPENS, special=special)
    with running((made, None)) as engine:
        client = client_of(engine)
        yield client, f"{ok(client, '/tokenize', content='</think>')['tokens'][-1]}"


@pytest.mark.parametrize(("constraint", "pattern"), FITTING, ids=str)
def test_what_binds_an_answer_leaves_the_thought_before_it_free(
    opening: tuple[TestClient, str], constraint: dict[str, Any], pattern: str
) -> None:
    client, end = opening
    body = make_body(temperature=1.0, seed=6, logit_bias={end: 4}, n=2, **constraint)
    choices = ok(client, CHAT, **body)["choices"]
    for choice in choices:
        assert choice["message"]["reasoning_content"], choice
        if pattern:
            assert re.fullmatch(pattern, choice["message"]["content"])
            assert choice["finish_reason"] == "stop"
        else:
            [call] = choice["message"]["tool_calls"]
            assert re.fullmatch(ARGUMENTS, call["function"]["arguments"])
    for each in ok(client, CHAT, **body, speculative=False)["choices"]:
        content, reasoning = (
            message.get(name)
            for message in (each["message"],)
            for name in ("content", "reasoning_content")
        )
        message = choices[each["index"]]["message"]
        assert (content, reasoning) == (message["content"], message["reasoning_content"])
    # A request that wants no thought gets none, although the prompt has opened one.
    body |= {"reasoning_effort": "none", "n": 1, "max_tokens": 60}
    for more in ({}, {"speculative": False}):
        message = ok(client, CHAT, **body, **more)["choices"][0]["message"]
        assert "reasoning_content" not in message
        assert not pattern or re.fullmatch(pattern, message["content"])


def test_a_model_may_open_a_thought_before_a_bound_answer(
    client: TestClient, special: bool
) -> None:
    begin, end = (
        f"{ok(client, '/tokenize', content=mark)['tokens'][-1]}" for mark in ("<think>", "</think>")
    )
    body = make_body(temperature=1.0, seed=6, guided_json=SCHEMA, logit_bias={begin: 9, end: 7})
    message = ok(client, CHAT, **body)["choices"][0]["message"]
    assert re.fullmatch(ARGUMENTS, message["content"]) and "reasoning_content" in message
    for more in (
        {"reasoning_effort": "none"},
        {"messages": [USER, {"role": "assistant", "content": "x"}], "continue_final_message": True},
    ):
        message = ok(client, CHAT, **{**body, **more})["choices"][0]["message"]
        assert re.fullmatch(ARGUMENTS, message["content"]), message
        assert "reasoning_content" not in message
    # A grammar that writes the marker decides on the thought itself.
    body = make_body(**bound_to("<think>Hm.</think>Yes.", special))
    message = ok(client, CHAT, **body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_calls_are_reported_as_calls(client: TestClient, special: bool) -> None:
    call = '{"name": "keep", "arguments": {"name": "ab", "age": 7}}'
    text = f"Yes.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>{call}</tool_call>"
    body = make_body(tools=TOOLS, reasoning_effort="none", **bound_to(text, special))
    [choice] = ok(client, CHAT, **body)["choices"]
    message, calls = choice["message"], choice["message"]["tool_calls"]
    assert (message["content"], choice["finish_reason"]) == ("Yes.", "tool_calls")
    assert [each["function"] for each in calls] == [
        {"name": "keep", "arguments": '{"name": "ab", "age": 7}'}
    ] * 2
    assert len({each["id"] for each in calls}) == 2 and calls[0]["type"] == "function"
    *_, last = chunks = streamed(client, CHAT, **body)
    answer = deltas(chunks)
    assert answer["content"] == "Yes."
    assert [each["function"] for each in answer["tool_calls"]] == [
        each["function"] for each in calls
    ]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    single = ok(client, CHAT, **body, parallel_tool_calls=False)["choices"][0]["message"]
    assert len(single["tool_calls"]) == 1
    # Nobody who has no tools hears of calls.
    without = make_body(**bound_to("<tool_call>{}</tool_call>", special))
    assert "tool_calls" not in ok(client, CHAT, **without)["choices"][0]["message"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_can_be_requested(client: TestClient, choice: Any, temperature: float) -> None:
    body = make_body(
        tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, temperature=temperature, seed=5
    )
    reply = ok(client, CHAT, **body)
    [answer] = reply["choices"]
    [call] = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    if call["function"]["name"] == "keep":
        assert re.fullmatch(ARGUMENTS, call["function"]["arguments"])
    else:
        assert choice == "required" and call["function"]["arguments"] == "{}"
    assert reply["timings"]["draft_n_accepted"] > 0
    [streaming] = deltas(streamed(client, CHAT, **body, speculative=False))["tool_calls"]
    assert streaming["function"] == call["function"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FLAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def test_a_text_with_a_format_is_an_answer_or_a_call(client: TestClient, special: bool) -> None:
    body = make_body(tools=TOOLS, response_format=FORMAT, max_tokens=60)
    begin, end = (ok(client, "/tokenize", content=f"<{each}tool_call>") for each in ("", "/"))
    first, last = (str(each["tokens"][-1]) for each in (begin, end))
    [choice] = ok(client, CHAT, **body, logit_bias={first: -100})["choices"]
    assert re.fullmatch(ARGUMENTS, choice["message"]["content"]), choice
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 1, "seed": 3}
    ended = str(ok(client, "/tokenize", content="</think>")["tokens"][-1])
    bias = {first: -100, ended: 4}
    message = ok(client, CHAT, **body, **thinking, logit_bias=bias)["choices"][0]["message"]
    assert "reasoning_content" in message, message
    # A call is as free as without a format: here the model may write nothing but marks.
    for plain in (False, True):
        bias = {first: 100, last: 100}
        answer = ok(client, CHAT, **body, logit_bias=bias, speculative=not plain)
        text = answer["choices"][0]["message"]["content"]
        assert text.startswith("<tool_call>") and len(text) > 60 * len("<tool_call>") / 2


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "no format"),
        ("/v1/responses", {"tool_choice": "required", "text": FLAT}, "no format"),
        ("/v1/messages", {"tool_choice": {"type": "any"}, "output_config": FLAT}, "no format"),
        (COMPLETIONS, {"tools": TOOLS, "response_format": FORMAT}, "tools is not supported"),
        (CHAT, {"type": "image_url", "image_url": {"url": IMAGE}}, "reads only text"),
        ("/v1/messages", {"type": "image", "source": SOURCE}, "reads only text"),
        ("/v1/responses", {"type": "input_image", "image_url": IMAGE}, ""),
    ],
)
def test_a_format_beside_demanded_calls_or_images(
    client: TestClient, path: str, more: dict[str, Any], said: str
) -> None:
    """400 in every format, but for images in Responses, whose place in the prompt a text takes."""
    name, tools = {
        "/v1/responses": ("input", RESPONSES),
        "/v1/messages": ("messages", ANTHROPIC),
    }.get(path, ("messages", None))
    content = [more] if "type" in more else "Who?"
    settings = {"text": FLAT} if "type" in more else {**({"tools": tools} if tools else {}), **more}
    given = (
        {"prompt": "x"} if path == COMPLETIONS else {name: [{"role": "user", "content": content}]}
    )
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = client.post(path, json={most: 60, **given, **settings})
    assert answer.status_code == (400 if said else 200), answer.text
    assert said in answer.text
    if not said:
        assert re.fullmatch(ARGUMENTS, answer.json()["output"][0]["content"][0]["text"])


def test_tools_that_may_not_be_called_are_not_named(client: TestClient) -> None:
    plain = ok(client, CHAT, **make_body(max_tokens=12))
    answer = ok(client, CHAT, **make_body(max_tokens=12, tools=TOOLS, tool_choice="none"))
    assert answer["choices"] == plain["choices"]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    more = ok(client, CHAT, **make_body(max_tokens=12, tools=TOOLS))
    assert more["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


def test_calls_and_results_are_sent_back_to_the_model(client: TestClient, special: bool) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "keep", "arguments": '{"a":1}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "kept"},
    ]
    answer = ok(client, "/tokenize", messages=messages, tools=TOOLS)
    prompt = (
        "[tools] keep drop[user] Who?[assistant] <think>Hm.</think>"
        '<tool_call>{"name": "keep", "arguments": {"a": 1}}</tool_call>[tool] kept[assistant]'
    )
    shown = re.sub(r"</?(think|tool_call)>", "", prompt) if special else prompt
    assert ok(client, "/detokenize", tokens=answer["tokens"])["content"] == shown
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 3}
    assert ok(client, CHAT, **body)["usage"]["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize("arguments", ['{"city', "[1]", "Bonn", '{"a":' * 9000])
def test_a_call_that_was_cut_can_be_sent_back(client: TestClient, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "keep", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = ok(client, "/tokenize", messages=messages, tools=TOOLS)
    prompt = ok(client, "/detokenize", tokens=answer["tokens"])["content"]
    assert json.dumps({"arguments": arguments}) in prompt


def test_a_last_message_can_be_continued(client: TestClient) -> None:
    messages = [USER, {"role": "assistant", "content": "It is "}]
    reply = ok(client, "/tokenize", messages=messages, continue_final_message=True)
    shown = ok(client, "/detokenize", tokens=reply["tokens"])["content"]
    assert shown == "[user] Who?[assistant] It is "
    body = {"max_tokens": 9, "temperature": 1.0, "seed": 4}
    text = ok(client, COMPLETIONS, prompt=reply["tokens"], **body)["choices"][0]["text"]
    reply = ok(client, CHAT, messages=messages, continue_final_message=True, **body)
    assert reply["choices"][0]["message"]["content"] == text
    reply = ok(client, MESSAGES, messages=messages, **body)
    assert [each["text"] for each in reply["content"]] == [text]
    calls = [{"function": {"name": "keep", "arguments": "{}"}}]
    for more in (
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": "yes"},
        {"continue_final_message": True, "messages": [{**messages[1], "tool_calls": calls}]},
    ):
        answer = client.post(CHAT, json={"messages": messages, **more})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "continue_final_message"


@pytest.fixture(scope="module")
def showing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Of a model whose template shows what it is told of thinking."""
    names = ("enable_thinking", "thinking", "reasoning_effort")
    shown = " ".join(f"{{{{ {each} | default('-') }}}}" for each in names)
    directory = make_tooled(tmp_path_factory.mktemp("settings"), template=f"{shown} {TEMPLATE}")
    with running((directory, None)) as engine:
        yield client_of(engine)


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "- - -"),
        ({"reasoning_effort": "none"}, "False False -"),
        ({"reasoning_effort": "low"}, "- - low"),
        ({"reasoning": {"effort": "low"}}, "- - low"),
        ({"enable_thinking": False}, "False False -"),
        ({"thinking": {"type": "enabled"}}, "True True -"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "True False -",
        ),
    ],
    ids=str,
)
def test_thinking_can_be_switched_off(
    showing: TestClient, more: dict[str, Any], shown: str
) -> None:
    answer = ok(showing, "/tokenize", messages=[USER], **more)
    prompt = ok(showing, "/detokenize", tokens=answer["tokens"])["content"]
    assert prompt.startswith(f"{shown} [user]")
    assert (
        ok(showing, CHAT, **make_body(max_tokens=1), **more)["usage"]["prompt_tokens"]
        == answer["count"]
    )


def test_functions_are_tools_by_their_older_name(client: TestClient) -> None:
    body = make_body(seed=1, temperature=1.0)
    answer = ok(client, CHAT, **body, tools=TOOLS, tool_choice=NAMED)["choices"]
    functions = [each["function"] for each in TOOLS]
    again = ok(client, CHAT, **body, functions=functions, function_call={"name": "keep"})["choices"]
    calls = [each[0]["message"]["tool_calls"][0]["function"] for each in (answer, again)]
    assert calls[0] == calls[1] and calls[0]["name"] == "keep"


def test_a_wrong_type_within_a_schema_is_no_error_of_the_server(client: TestClient) -> None:
    for kind in (5, {}, None):
        tools = [function("keep", {"type": "object", "properties": {"a": {"type": kind}}})]
        for choice, statuses in (("auto", {200}), ("required", {200, 400})):
            body = make_body(tools=tools, tool_choice=choice, max_tokens=4)
            assert client.post(CHAT, json=body).status_code in statuses


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"tools": [{"type": "custom"}]}, "tools", 'type must be "function"'),
        ({"tools": [function("a b")]}, "tools", "name"),
        (
            {"tools": [function("a", {"required": [["a"]]})]},
            "tools",
            "required[0] must be a string",
        ),
        ({"function_call": {"name": "keep"}}, "function_call", "give functions"),
        ({"tools": [function(f"f{at}") for at in range(129)]}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "asks for a call: give tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "none of the functions",
        ),
        (
            {"tools": TOOLS, "tool_choice": NAMED, "regex": "a"},
            "tool_choice",
            "no format or grammar for the text",
        ),
        (
            {"tools": [function("a", {"type": "strin"})], "tool_choice": "required"},
            "tools",
            "the parameters of a: json-schema is wrong: Invalid type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages",
            "function is missing: give it",
        ),
    ],
    ids=lambda each: str(each)[:40],
)
def test_what_is_wrong_with_tools_is_reported_by_name(
    client: TestClient, more: dict[str, Any], param: str, said: str
) -> None:
    answer = client.post(CHAT, json=make_body(**more))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}{{ m.content }}<tool_call>tool_call.name{% endfor %}",
            "does not support",
        ),
        (TEMPLATE.replace("tool_call", "call_of_its_own"), "is unknown"),
        (None, "need a chat template"),
    ],
    ids=["no tools", "unknown calls", "no template"],
)
def test_a_model_that_knows_no_tools_says_so(
    tmp_path: Path, llama: tuple[Path, Path], template: str | None, said: str
) -> None:
    served = llama if template is None else (make_tooled(tmp_path, template=template), None)
    with running(served) as engine:
        answer = client_of(engine).post(CHAT, json=make_body(tools=TOOLS))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert said in error["message"]


@pytest.mark.parametrize("speculative", [True, False])
def test_a_demanded_call_is_the_only_one_unless_the_model_goes_on(
    client: TestClient, speculative: bool
) -> None:
    """The model never writes its EOS token here. After a call, it goes on only if it writes the
    beginning of another call by itself."""

    def id_of(text: str) -> str:
        return str(ok(client, "/tokenize", content=text)["tokens"][-1])

    body = make_body(tools=TOOLS, tool_choice="required", enable_thinking=False)
    body |= {"temperature": 1.0, "seed": 1, "speculative": speculative, "max_tokens": 110}
    bias: dict[str, float] = {id_of("<|end|>"): -90}
    [choice] = ok(client, CHAT, **body, logit_bias=bias)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1 and not choice["message"]["content"]
    bias |= {id_of("<tool_call>"): 60}
    [choice] = ok(client, CHAT, **body, logit_bias=bias)["choices"]
    assert len(choice["message"]["tool_calls"]) > 1
    [choice] = ok(client, CHAT, **body, logit_bias=bias, parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", *FORMATS["kimi_k2"].inner)


@pytest.mark.parametrize(
    ("marks", "id"),
    [
        (KIMI, r"functions\.keep:\d{1,3}"),
        (("[TOOL_CALLS]", "[ARGS]"), "call_.*"),
        (("[TOOL_CALLS]",), "call_.*"),
    ],
    ids=["kimi_k2", "mistral", "mistral's lists"],
)
def test_models_of_other_families_call_in_their_own_way(
    tmp_path: Path, marks: tuple[str, ...], id: str
) -> None:
    template = TEMPLATE.replace("<tool_call>", "".join(marks)).replace("tool_call.name", "name")
    directory = make_tooled(tmp_path, template=template, special=True, marks=marks)
    with running((directory, None)) as engine:
        client = client_of(engine)
        body = make_body(tools=TOOLS, tool_choice=NAMED, seed=3, temperature=1.0)
        [choice] = ok(client, CHAT, **body)["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        assert re.fullmatch(ARGUMENTS, call["function"]["arguments"])
        assert re.fullmatch(id, call["id"])
        chunks = streamed(client, CHAT, **body, speculative=False)
        [same] = deltas(chunks)["tool_calls"]
        assert same["function"] == call["function"]
        several = ok(client, CHAT, **{**body, "tool_choice": "required", "max_tokens": 100})
        calls = several["choices"][0]["message"].get("tool_calls", [])
        assert all(re.fullmatch(ARGUMENTS + r"|\{\}", c["function"]["arguments"]) for c in calls)


ODD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path", "pattern": "^[a-z]{1,4}$"},
        "hosts": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "maxItems": 2,
            "uniqueItems": True,
        },
        "never": {"not": {}},
        "not": {"anyOf": [{"not": {}}, {"const": 7}]},
    },
    "required": ["path", "hosts"],
    "additionalProperties": {"not": {}},
    "propertyNames": {"pattern": "^[a-z]+$"},
}
"""A schema as tools have it, with keywords that assert nothing or cannot be enforced."""


@pytest.mark.parametrize("asked", ["required", "named", "format"])
def test_a_schema_is_enforced_as_far_as_it_can_be(client: TestClient, asked: str) -> None:
    tools = [function("keep", ODD), *TOOLS[1:]]
    choice = NAMED if asked == "named" else "required"
    body = make_body(temperature=1.0, seed=2, parallel_tool_calls=False, reasoning_effort="none")
    if asked == "format":
        [choice] = ok(client, CHAT, **body, guided_json=ODD)["choices"]
        arguments = choice["message"]["content"]
    else:
        body |= {"tools": tools[:1], "tool_choice": choice}
        [choice] = ok(client, CHAT, **body)["choices"]
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    given = json.loads(arguments)
    assert re.fullmatch("[a-z]{1,4}", given["path"]) and len(given["hosts"]) <= 2
    assert {"path", "hosts"} <= given.keys() <= {"path", "hosts", "not"}
    assert given.get("not", 7) == 7


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"uniqueItems": True, "type": "array", "maxItems": 1}, "uniqueItems"),
        ({"type": "boolean", "not": {"const": True}}, "not"),
        ({"type": "boolean", "format": "of my own", "uniqueItems": False}, ""),
    ],
    ids=str,
)
def test_what_is_not_enforced_is_logged(
    caplog: pytest.LogCaptureFixture, schema: dict[str, Any], said: str
) -> None:
    Options(json_schema={**schema, "$comment": said})
    assert [said in each.getMessage() for each in caplog.records] == [True] * bool(said)


MESSAGES = "/v1/messages"


def test_anthropics_clients_call_tools(client: TestClient) -> None:
    body = {"max_tokens": 200, "messages": [USER], "tools": ANTHROPIC, "seed": 2}
    # Of several calls, the last one may be cut.
    single = {"disable_parallel_tool_use": True}
    choice = {"type": "tool", "name": "keep"}
    reply = ok(client, MESSAGES, **body, tool_choice={**choice, **single})
    [block] = [each for each in reply["content"] if each["type"] == "tool_use"]
    assert block["caller"] == {"type": "direct"}
    assert block["name"] == "keep" and block["input"].keys() == {"name", "age"}
    assert reply["stop_reason"] == "tool_use"
    answer = client.post(
        MESSAGES, json={**body, "tool_choice": {"type": "any", **single}, "stream": True}
    )
    events = [json.loads(each) for each in re.findall("data: (.*)", answer.text)]
    starts = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert starts[-1]["type"] == "tool_use" and starts[-1]["input"] == {}
    last = [each["index"] for each in events if each["type"] == "content_block_start"][-1]
    pieces = [
        each["delta"]["partial_json"]
        for each in events
        if each["type"] == "content_block_delta" and each["index"] == last
    ]
    assert json.loads("".join(pieces)).keys() == {"name", "age"}
    assert [each["type"] for each in events][-2:] == ["message_delta", "message_stop"]


def test_anthropics_clients_tell_results_and_hear_thoughts(
    client: TestClient, special: bool
) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "keep", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "kept"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    more = {"type": "text", "text": "And?"}
    messages = [
        USER,
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result, more]},
    ]
    body = {"max_tokens": 9, "messages": messages, "tools": ANTHROPIC}
    call = {"function": {"name": "keep", "arguments": '{"a": 1}'}}
    same = [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "kept"},
        {"role": "user", "content": "And?"},
    ]
    reply = ok(client, "/tokenize", messages=same, tools=[function("keep")])
    assert ok(client, f"{MESSAGES}/count_tokens", **body) == {"input_tokens": reply["count"]}
    assert ok(client, MESSAGES, **body)["usage"]["input_tokens"] == reply["count"]
    # Without anything that binds it, the text of a tiny model is one long thought.
    thinking = {"max_tokens": 9, "messages": [USER], "thinking": {"type": "enabled"}}
    [block] = ok(client, MESSAGES, **thinking)["content"]
    assert block["type"] == "thinking" and block["thinking"]
    answer = client.post(MESSAGES, json={**thinking, "stream": True}).text
    deltas = re.findall(r'"type": "thinking_delta", "thinking": ("(?:[^"\\]|\\.)*")', answer)
    assert "".join(map(json.loads, deltas)) == block["thinking"]
    for wrong in ({"thinking": {"type": "x"}}, {"tool_choice": {"type": "x"}}, {"tools": [5]}):
        assert client.post(MESSAGES, json={**body, **wrong}).status_code == 400
