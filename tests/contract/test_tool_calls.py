"""Tool calls: what a model writes reaches the client unchanged, in four APIs, streamed or not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.call_templates import TEMPLATES, written
from .learned import learned
from .support import Server, served

PROPERTIES = {
    "path": {"type": "string"},
    "old": {"type": "string"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "lines": {"type": "array", "items": {"type": "string"}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
INDENTED = {"path": "null", "old": "    if a:\n\treturn b  \n"}
TAGS = {
    "path": "a</parameter>b</tool_call>c</arg_value>d</param>e]]>f</invoke>g",
    "old": "  <parameter=path>x</function>\n}y<tool_call|>z\n",
    "note": "null and more",
    "count": 3,
    "lines": ["</tool_call>", " <|tool_call_end|> ", "'"],
}
TWO = [("edit", {"path": "a\n", "count": 1}), ("edit", {"path": " b"})]
Said = tuple[str, list[tuple[str, Any]]]
"""The content of an answer, and its calls."""

_STORED = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
ANSWERS: dict[str, dict[str, tuple[str, Said]]] = {
    format: {
        cue: (text, (said[0], [(name, value) for name, value in said[1]]) if said else (text, []))
        for cue, (text, *said) in answers.items()
    }
    for format, answers in _STORED.items()
    if format != "channels"
}
"""Answers of models by their format and a cue, and how they are read."""
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY += ("<|end|>", "<|call|>", "<|return|>")
SIGNS = {
    "llama3_json": '{# "parameters": dictionary of argument name and its value #}',
    "harmony": "{# <|channel|> #}",
}
"""Texts by which the templates of a format are recognized, if they do not write them."""


def template_of(format: str) -> str:
    """Return a chat template that writes calls in a format, and ends with the last content."""
    return (
        f"{SIGNS.get(format, '')}{{% for tool in tools or [] %}}{{{{ tool.function.name }}}}"
        "{% endfor %}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
        "{% set calls = m.tool_calls | map(attribute='function') | list %}"
        f"{TEMPLATES.get(format, '{{ calls | tojson }}')}{{% endif %}}"
        "{{ m.content }}{% endfor %}"
    )


def expected(format: str) -> dict[str, tuple[str, Said]]:
    """Return the answers of a format by their cues, and how they are read."""
    answers = dict(ANSWERS.get(format, {}))
    if format in TEMPLATES:
        for cue, calls in (("indented", [("edit", INDENTED)]), ("tags", [("edit", TAGS)])):
            answers[cue] = written(format, calls), ("", calls)
        if format != "llama3_json":
            answers["two"] = written(format, TWO), ("", TWO)
    return answers


MARKERS = {
    "qwen3_coder": ("<tool_call>", False),
    "glm47": ("<tool_call>", True),
    "minimax_m2": ("<minimax:tool_call>", True),
    "muse_spark": ("<atem:function_calls>", True),
    "minicpm5": ("<function name=", False),
    "seed_oss": ("<seed:tool_call>", True),
    "longcat": ("<longcat_tool_call>", True),
    "gemma4": ("<|tool_call>", True),
    "pythonic": ("<|tool_call_start|>", True),
}
"""The text before a call, and whether it is a special token, by formats whose arguments are not
JSON."""
UNLISTED = {**INDENTED, "unlisted": "x"}
"""Arguments that do not fit the schema of the tool."""
NAMED = {"type": "function", "function": {"name": "edit"}}
FORMATS = [*(name for name in TEMPLATES if "'" not in name), "harmony"]


def model_of(directory: Path, format: str, **settings: Any) -> Path:
    """Write a model that has learned the answers of a format."""
    answers = {f"<<{cue}>>": answer for cue, (answer, _) in expected(format).items()}
    if format == "json_tools":
        answers["<<custom>>"] = written(format, [("patch", {"input": "a\n  b"})])
    tokens = HARMONY if format == "harmony" else ()
    return learned(directory, answers, template_of(format), tokens=tokens, **settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    models = [model_of(root / format, format) for format in FORMATS]
    models += [
        model_of(root / "older-label", "qwen3_coder", tool_parser_type="json_tools"),
        model_of(root / "unknown-label", "qwen3_coder", tool_parser_type="my_parser"),
    ]
    for format, (marker, special) in MARKERS.items():
        answer = written(format, [("edit", UNLISTED)]).lstrip()
        # After a special token that it did not write itself, the model gives its first answer.
        answer = answer.removeprefix(marker) if special else answer
        label = {"tool_parser_type": "json_tools"} if format == "qwen3_coder" else {}
        directory, tokens = root / f"{format}-alone", (marker,) if special else ()
        answers, template = {"<<alone>>": answer}, template_of(format)
        models.append(learned(directory, answers, template, tokens=tokens, **label))
    flags = [flag for model in models for flag in ("--model", model)]
    with served(*flags, "--max-tokens", 400) as running:
        yield running


def chat(server: Server, body: dict[str, Any], *, stream: bool) -> Said:
    function = {"name": "edit", "parameters": PARAMETERS}
    body = {"tools": [{"type": "function", "function": function}], **body, "stream": stream}
    answer = server.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    content, calls = "", list[dict[str, str]]()
    parts = answer.events if stream else [answer.json]
    for choice in (choice for part in parts for choice in part["choices"]):
        message = choice["delta" if stream else "message"]
        content += message.get("content") or ""
        for call in message.get("tool_calls", ()):
            function = call["function"]
            calls += [{"name": function["name"], "arguments": ""}] if "id" in call else []
            calls[-1]["arguments"] += function["arguments"]
        reason = choice["finish_reason"]
    assert reason == ("tool_calls" if calls else "stop")
    return content, [(call["name"], json.loads(call["arguments"])) for call in calls]


def responses(server: Server, body: dict[str, Any], *, stream: bool) -> Said:
    tool = {"type": "function", "name": "edit", "parameters": PARAMETERS}
    input = body.pop("messages")
    answer = server.ask(
        "/v1/responses", {**body, "input": input, "tools": [tool], "stream": stream}
    )
    assert answer.status == 200, answer.body
    items = (answer.events[-1]["response"] if stream else answer.json)["output"]
    if stream:
        done = [event for event in answer.events if event["type"] == "response.output_item.done"]
        assert [event["item"] for event in done] == items
        deltas = [event["delta"] for event in answer.events if "delta" in event]
        texts = [item.get("arguments") or item["content"][0]["text"] for item in items]
        assert "".join(deltas) == "".join(texts)
    messages = [item for item in items if item["type"] == "message"]
    content = "".join(part["text"] for item in messages for part in item["content"])
    calls = [item for item in items if item["type"] == "function_call"]
    return content, [(call["name"], json.loads(call["arguments"])) for call in calls]


def messages(server: Server, body: dict[str, Any], *, stream: bool) -> Said:
    tool = {"name": "edit", "input_schema": PARAMETERS}
    body = {**body, "tools": [tool], "max_tokens": 400, "stream": stream}
    answer = server.ask("/v1/messages", body)
    assert answer.status == 200, answer.body
    if not stream:
        blocks, reason = answer.json["content"], answer.json["stop_reason"]
    else:
        blocks = []
        for event in answer.events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "written": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                blocks[-1]["written"] += delta.get("text") or delta.get("partial_json") or ""
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
        for block in blocks:
            text = block["written"]
            block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
    content = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert reason == ("tool_use" if calls else "end_turn")
    return content, [(call["name"], call["input"]) for call in calls]


def ollama(server: Server, body: dict[str, Any], *, stream: bool) -> Said:
    function = {"name": "edit", "parameters": PARAMETERS}
    body = {**body, "tools": [{"type": "function", "function": function}], "stream": stream}
    answer = server.ask("/api/chat", body)
    assert answer.status == 200, answer.body
    parts = [part["message"] for part in (answer.events if stream else [answer.json])]
    calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    content = "".join(part["content"] for part in parts)
    return content, [(call["name"], call["arguments"]) for call in calls]


OTHERS = (responses, messages, ollama)


def check(server: Server, model: str, cue: str, said: Said, number: int = 0) -> None:
    """Check an answer of OpenAI's chat API, whole and streamed, and of another API. number: Chooses
    this API, and whether it streams."""
    other = OTHERS[number % len(OTHERS)], number % 2 == 1
    for way, stream in ((chat, False), (chat, True), other):
        body = {"model": model, "messages": [{"role": "user", "content": f"<<{cue}>>"}]}
        assert way(server, body, stream=stream) == said, (way.__name__, stream)


CASES = [(format, cue) for format in FORMATS for cue in expected(format)]


@pytest.mark.parametrize(("number", "case"), [*enumerate(CASES)], ids=str)
def test_a_call_has_the_arguments_that_the_model_wrote(
    server: Server, number: int, case: tuple[str, str]
) -> None:
    format, cue = case
    check(server, format, cue, expected(format)[cue][1], number)


@pytest.mark.parametrize("label", ["older-label", "unknown-label"])
def test_the_chat_template_wins_over_a_label_of_the_format(server: Server, label: str) -> None:
    check(server, label, "tags", ("", [("edit", TAGS)]))


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("format", MARKERS)
def test_a_demanded_call_begins_with_the_marker_and_goes_on_freely(
    server: Server, format: str, choice: Any
) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    body = {"messages": [{"role": "user", "content": "<<alone>>"}], "model": f"{format}-alone"}
    marker, special = MARKERS[format]
    for stream in (False, True):
        _, calls = chat(server, body, stream=stream)
        assert bool(calls) != special
        said = chat(server, {**body, "tool_choice": choice}, stream=stream)
        assert said == ("", [("edit", UNLISTED)])
    tools = [{"type": "function", "function": {"name": "edit", "parameters": PARAMETERS}}]
    body |= {"tools": tools, "tool_choice": choice, "max_tokens": len(marker)}
    [cut] = server.ok("/v1/chat/completions", **body)["choices"]
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith(marker)
