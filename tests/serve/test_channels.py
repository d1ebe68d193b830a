"""Models that write messages in channels, as gpt-oss does in OpenAI's Harmony format."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

from starlette.testclient import TestClient

from mlx_specdec.serve.channels import ChannelReader
from mlx_specdec.serve.events import Arguments, Call, Text, joined
from mlx_specdec.text.markers import Markers, markers_of
from mlx_specdec.text.tokenizer import load_tokenizer
from mlx_specdec.text.tool_formats import HARMONY

from ..support.serving import CHAT, SCHEMA, client_of, ok, running, streamed
from ..support.tooled import ANTHROPIC, NAMED, TOOLS, make_tooled, of_parser

TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>namespace functions {% for tool in tools %}"
    "type {{ tool.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% for call in m.tool_calls or [] %}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if m.role == 'assistant' and m.content %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.content %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ARGUMENTS = r'\{"name": "[a-z]{1,4}", "age": \d{1,2}\}'
USER = {"role": "user", "content": "Who?"}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>Yes."
PREAMBLE = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
KEEP = '{"name": "ab", "age": 7}'
CALLING = f"<|channel|>commentary to=functions.keep <|constrain|>json<|message|>{KEEP}"
CALLED = f" to=functions.keep<|channel|>commentary json<|message|>{KEEP}"
CASES: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "answer": (ANSWER, "", "Yes.", []),
    "thought": (f"{THOUGHT}{ANSWER}<|return|>", "Hm.", "Yes.", []),
    "no header": ("Yes, to be sure.", "", "Yes, to be sure.", []),
    "call": (f"{THOUGHT}{CALLING}", "Hm.", "", [("keep", KEEP)]),
    "recipient first": (CALLED, "", "", [("keep", KEEP)]),
    "preamble": (f"{THOUGHT}{PREAMBLE}{CALLING}<|call|>", "Hm.", "Wait.", [("keep", KEEP)]),
    "result of its own": (
        f"{CALLING}<|call|><|start|>functions.keep to=assistant<|channel|>commentary<|message|>3"
        f"<|end|><|start|>assistant{ANSWER}",
        "",
        "Yes.",
        [("keep", KEEP)],
    ),
    "cut header": ("<|channel|>ana", "", "", []),
    "cut call": (CALLING[:-5], "", KEEP[:-5], []),
    "less than": ("<|channel|>final<|message|>a <| b <|en", "", "a <| b <|en", []),
}


@pytest.mark.parametrize("case", CASES)
def test_messages_are_read_however_the_text_arrives(case: str) -> None:
    text, reasoning, content, calls = CASES[case]
    markers = Markers(calls=of_parser("json_tools"))
    for size in (1, 2, 3, 7, len(text)):
        reader, events = ChannelReader(markers, TOOLS), []
        for at in range(0, len(text), size):
            events += reader.read(text[at : at + size])
        events = [*joined(events + reader.read(None))]
        kinds = {"reasoning": "", "content": ""}
        for each in events:
            if isinstance(each, Text):
                kinds[each.kind] += each.text
        names = [each.name for each in events if isinstance(each, Call)]
        arguments = [each.text for each in events if isinstance(each, Arguments)]
        assert kinds == {"reasoning": reasoning, "content": content}, (size, events)
        assert [*zip(names, arguments, strict=True)] == calls
        assert reader.count == len(calls)


def test_a_message_may_be_continued_and_calls_need_tools() -> None:
    reader = ChannelReader(header=False)
    events = reader.read(f"es.<|end|><|start|>assistant{CALLING}") + reader.read(None)
    assert [each.text for each in joined(events) if isinstance(each, Text)] == [f"es.{KEEP}"]
    markers = Markers(calls=of_parser("json_tools"))
    twice = f"{CALLING}<|call|><|start|>assistant{CALLING}"
    single = ChannelReader(markers, TOOLS, most_calls=1)
    events = single.read(twice) + single.read(None)
    assert sum(isinstance(each, Call) for each in events) == 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("channels")
    make_tooled(made, template=TEMPLATE, special=True, marks=HARMONY)
    size = load_tokenizer(made, kind="decoder-only").size
    named = {"tokenizer_config": {"eos_token": "<|return|>"}, "config": {"eos_token_id": size - 1}}
    for name, changes in named.items():
        file = made / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return made


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[TestClient]:
    with running((directory, None)) as engine:
        yield client_of(engine)


def bound_to(text: str) -> dict[str, str]:
    """A field that lets an output be nothing else."""
    parts = [each for each in re.split(r"(<\|\w+\|>)", text) if each]
    rules = (each if each in HARMONY else json.dumps(each) for each in parts)
    return {"grammar": "start: " + " ".join(rules)}


def test_the_format_is_recognized_by_template_and_vocabulary(
    directory: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(directory, kind="decoder-only")
    markers = markers_of(tokenizer)
    assert {*markers.special.values()} == {*HARMONY}
    for text, within in (("<|start|>assistant", True), (f"<|start|>assistant{ANSWER}", False)):
        assert markers.in_header(tokenizer.encode(text)) is within
    without = markers.without_calls()
    assert without.calls is None and without.special == markers.special
    other = make_tooled(tmp_path, template="{{ messages }}", special=True, marks=HARMONY)
    assert markers_of(load_tokenizer(other, kind="decoder-only")).channels is None


def test_a_message_of_analysis_has_a_budget(directory: Path) -> None:
    tokenizer = load_tokenizer(directory, kind="decoder-only")
    markers, end = markers_of(tokenizer), tokenizer.ids["<|end|>"]
    thoughts = markers.thoughts(tokenizer.encode("<|start|>user<|message|>Hi<|end|>"), 4)
    assert thoughts is not None and not thoughts.open
    thought = tokenizer.encode(THOUGHT)
    begun = thought[thought.index(tokenizer.ids["<|channel|>"]) : thought.index(end)]
    within = thoughts.after(begun)
    assert within.open and 0 < within.tokens <= 4
    assert within.after([9] * (4 - within.tokens)).forced == end
    assert not within.after([end]).open
    open_prompt = markers.thoughts(tokenizer.encode("<|start|>assistant") + begun, 0)
    assert open_prompt is not None and open_prompt.forced == end


def test_a_chat_has_thoughts_answers_and_calls(client: TestClient) -> None:
    body = {"messages": [USER], "max_tokens": 200}
    answer = {**body, **bound_to(THOUGHT + ANSWER)}
    [choice] = ok(client, CHAT, **answer)["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    chunks = [each["choices"][0]["delta"] for each in streamed(client, CHAT, **answer)]
    for name, text in (("reasoning_content", "Hm."), ("content", "Yes.")):
        assert "".join(each.get(name, "") for each in chunks) == text
    calling = {**body, "tools": TOOLS, **bound_to(THOUGHT + CALLING)}
    [choice] = ok(client, CHAT, **calling)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "keep", "arguments": KEEP}
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    chunks = [each["choices"][0]["delta"] for each in streamed(client, CHAT, **calling)]
    parts = [one["function"] for each in chunks for one in each.get("tool_calls", [])]
    assert "".join(each["arguments"] for each in parts) == KEEP


def test_other_wire_formats_have_the_same_parts(client: TestClient) -> None:
    forced = bound_to(THOUGHT + CALLING)
    tool = {"type": "function", "name": "keep", "parameters": SCHEMA}
    body = {"input": "Who?", "tools": [tool], "structured_outputs": forced}
    items = ok(client, "/v1/responses", **body)["output"]
    assert [each["type"] for each in items] == ["reasoning", "function_call"]
    assert (items[1]["name"], items[1]["arguments"]) == ("keep", KEEP)
    body = {"messages": [USER], "max_tokens": 200, "tools": ANTHROPIC, "temperature": 1, "seed": 3}
    calm = {"type": "disabled"}
    reply = ok(client, "/v1/messages", **body, thinking=calm, tool_choice={"type": "any"})
    [block] = reply["content"]
    assert (reply["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "keep")
    assert re.fullmatch(ARGUMENTS, json.dumps(block["input"]))


@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_call_or_a_format_can_be_requested(
    client: TestClient, directory: Path, effort: str
) -> None:
    pieces = load_tokenizer(directory, kind="decoder-only").pieces()
    # The end of a thought is likely, so that it comes soon.
    bias = {f"{pieces.index('<|end|>')}": 4}
    body = {"messages": [USER], "max_tokens": 200, "temperature": 1.0, "seed": 4}
    body |= {"logit_bias": bias, "reasoning_effort": effort}
    call = {"tools": TOOLS, "tool_choice": NAMED}
    for more in (call, {"guided_json": SCHEMA}, {"regex": "ab[ab]"}):
        [choice] = ok(client, CHAT, **body, **more)["choices"]
        [plain] = ok(client, CHAT, **body, **more, speculative=False)["choices"]
        message = choice["message"]
        assert plain["message"]["content"] == message["content"]
        assert effort == "low" or "reasoning_content" not in message
        if more is call:
            [found] = message["tool_calls"]
            assert re.fullmatch(ARGUMENTS, found["function"]["arguments"])
            assert choice["finish_reason"] == "tool_calls"
        else:
            assert re.fullmatch(more.get("regex", ARGUMENTS), message["content"])
            assert choice["finish_reason"] == "stop"
    # Without a c there is no commentary, and so no call.
    bias |= {f"{id}": -100 for id, piece in enumerate(pieces) if piece and piece[0] == "c"}
    both = {**body, "tools": TOOLS, "guided_json": SCHEMA, "logit_bias": bias}
    message = ok(client, CHAT, **both)["choices"][0]["message"]
    assert re.fullmatch(ARGUMENTS, message["content"])


def test_a_call_with_a_thought_and_a_preamble_can_be_sent_back(client: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "keep", "arguments": KEEP}}
    turn = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm."}
    messages = [USER, {**turn, "tool_calls": [call]}, {"role": "tool", "content": "kept"}]
    prompt = ok(client, "/apply-template", messages=messages, tools=TOOLS)["prompt"]
    assert "analysis<|message|>Hm.\nWait.<|end|>" in prompt
    assert f"to=functions.keep<|channel|>commentary json<|message|>{KEEP}<|call|>" in prompt
    assert prompt.endswith("<|end|><|start|>assistant")
