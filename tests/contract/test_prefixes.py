"""Prompts of a conversation begin alike, and what the prefix cache holds is not computed again."""

import random
from typing import Any

import pytest

from .several import PROMPT, SCHEMA, Several

COMPLETIONS, CHATS, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
LEFT = "<total_tokens>12345 tokens left</total_tokens>"
SYSTEM, ANSWER = {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def prompt_of(several: Several, messages: list[Any], model: str = "in-place", **more: Any) -> str:
    answer = several.server.ok("/apply-template", model=model, messages=messages, **more)
    return str(answer["prompt"]).removesuffix("[assistant]")


def test_countdowns_are_left_out(several: Several) -> None:
    said = [SYSTEM, say("user", LEFT), say("system", LEFT), ANSWER]
    kept = f"[system] S\n[user] {LEFT}\n[assistant] A\n"
    assert prompt_of(several, said) == kept
    parts = [{"type": "text", "text": text} for text in (f" {LEFT}\n", "Be calm.")]
    user = say("user", "U")
    assert prompt_of(several, [{**SYSTEM, "content": parts}, user]) == (
        "[system] Be calm.\n[user] U\n"
    )
    several.server.waits_for("countdowns")
    assert len([line for line in several.server.log if "countdowns" in line]) == 1
    for text in (f"{LEFT} and more", "<total_tokens>none</total_tokens>"):
        assert prompt_of(several, [say("system", text), user]) == f"[system] {text}\n[user] U\n"


def test_later_system_messages_are_folded_where_they_stand(several: Several) -> None:
    """This template takes a system message only at the beginning."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "content": "C", "tool_calls": [call]}
    results = [{**say("tool", text), "tool_call_id": "c"} for text in ("T1", "T2")]
    talk = [SYSTEM, say("system", "S2"), say("user", "U"), say("system", "a"), calls]
    talk += [say("system", "b"), *results, say("system", "c"), ANSWER]
    talk += [say("system", "d"), say("user", "V"), ANSWER, say("system", "e")]
    folded = (
        "[system] S\n\nS2\n[user] U\n\na\n[assistant] C\n[tool] T1\n\nb\n[tool] T2\n\nc\n"
        "[assistant] A\n[user] d\n\nV\n[assistant] A\n[user] e\n"
    )
    assert prompt_of(several, talk, "raising") == folded
    # Each prompt extends the one before.
    for end, message in enumerate(talk):
        if end and message["role"] == "assistant":
            assert folded.startswith(prompt_of(several, talk[:end], "raising"))


@pytest.mark.parametrize("model", ["hoisting", "raising", "in-place"])
def test_templates_are_tried(several: Several, model: str) -> None:
    folded = "[system] S\n[user] U\n\nX\n[assistant] A\n[user] V\n"
    if model == "in-place":
        folded = "[system] S\n[user] U\n[system] X\n[assistant] A\n[user] V\n"
    talk = [say("user", "U"), say("system", "X"), ANSWER, say("user", "V")]
    assert prompt_of(several, [SYSTEM, *talk], model) == folded
    body = {"model": model, "system": "S", "messages": talk}
    counted = several.server.ok(f"{MESSAGES}/count_tokens", **body)["input_tokens"]
    assert counted == len(several.ids(f"{folded}[assistant]", model)) - 1


def test_keys_of_tools_have_one_order_and_nothing_for_servers_in_it(several: Several) -> None:
    def shuffled(value: Any, dice: random.Random) -> Any:
        if not isinstance(value, dict):
            return value
        names = dice.sample(list(value), len(value))
        return {name: shuffled(value[name], dice) for name in names}

    function = {"name": "keep", "description": "Keeps.", "parameters": SCHEMA}
    prompts = set()
    for seed in range(5):
        tool = shuffled({"type": "function", "function": function}, random.Random(seed))
        tool["function"] |= {"cache_control": {"type": "ephemeral"}} if seed else {}
        prompts.add(prompt_of(several, [say("user", "Who?")], "chat", tools=[tool]))
    [prompt] = prompts
    assert prompt.startswith('[{"type": "function", "function": {"name": "keep", "description"')
    assert "cache_control" not in prompt
    counts = set()
    for more in ({}, {"cache_control": {"type": "ephemeral"}}):
        text = {"type": "text", "text": "Who?", **more}
        tool = {"name": "keep", "input_schema": SCHEMA, **more}
        body = {
            "system": [text],
            "tools": [tool],
            "messages": [{"role": "user", "content": [text]}],
        }
        answer = several.server.ok(f"{MESSAGES}/count_tokens", model="chat", **body)
        counts.add(answer["input_tokens"])
    assert len(counts) == 1


def test_what_changes_means_nothing_to_the_prompt_cache(several: Several) -> None:
    """Two turns of Claude Code, and reasoning that the template drops with the next question."""

    def turn(number: int, messages: list[Any]) -> dict[str, Any]:
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05};"
        system = [{"type": "text", "text": text} for text in (billing, "You edit files. " * 9)]
        body = {"model": "forgetful", "system": system, "messages": messages, "max_tokens": 4}
        usage: dict[str, Any] = several.server.ok(MESSAGES, **body)["usage"]
        return usage

    question = [say("user", "Who? " * 20), say("system", LEFT)]
    thought = {"type": "thinking", "thinking": "Hm. " * 20}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "Me."}]}
    later = [answer, say("user", "Why?"), say("system", LEFT.replace("1", "2"))]
    first = turn(1, question)
    before = first["input_tokens"] + first["cache_read_input_tokens"]
    assert turn(2, [*question, *later])["cache_read_input_tokens"] >= before - 1


@pytest.fixture
def system(request: pytest.FixtureRequest) -> str:
    """A text that no other test begins with."""
    return f"{request.node.name} reads files, line by line, and says nothing else. " * 2


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_is_read_once(several: Several, system: str) -> None:
    talk = [say("system", system), say("user", PROMPT)]
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0.9, "seed": 4}
    first = several.server.ok(CHATS, messages=talk, **body)
    assert first["timings"]["cache_n"] == cached(first) < 30
    talk += [first["choices"][0]["message"], say("user", "x")]
    reply = several.server.ok(CHATS, messages=talk, **body)
    usage, timings = reply["usage"], reply["timings"]
    assert first["usage"]["prompt_tokens"] - 1 <= cached(reply) < usage["prompt_tokens"]
    assert timings["cache_n"] == cached(reply)
    assert timings["prompt_n"] == usage["prompt_tokens"] - cached(reply)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_that_of_the_prompt_alone(
    several: Several, system: str, temperature: float
) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": temperature, "seed": 4}
    for tail in ("a", "b", "a", "a c"):
        answer = several.server.ok(COMPLETIONS, model="tiny", prompt=system + tail, **settings)
        assert answer["choices"][0]["text"] == several.alone(system + tail, **settings)
    assert cached(answer) > 20


def test_every_api_tells_of_it(several: Several, system: str) -> None:
    server = several.server
    for _ in range(2):
        body = {"model": "tiny", "prompt": system, "max_tokens": 2}
        answer = server.ok(COMPLETIONS, **body, n=3)
    # Several completions count a prompt once.
    assert cached(answer) == answer["usage"]["prompt_tokens"] - 1
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    last = server.ask(COMPLETIONS, streamed).events[-1]
    assert cached(last) == last["usage"]["prompt_tokens"] - 1
    body = {"model": "tiny", "messages": [say("user", system)], "max_tokens": 3}
    first, second = (server.ok(MESSAGES, **body)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < 30 and first["output_tokens"] == 3
    assert second["input_tokens"] == 1
    read = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] == read - 1
    events = server.ask(MESSAGES, {**body, "stream": True}).events
    assert events[-2]["usage"]["cache_read_input_tokens"] == read - 1
    body = {"model": "tiny", "input": system, "max_output_tokens": 3}
    _, usage = (server.ok("/v1/responses", **body)["usage"] for _ in range(2))
    assert usage["input_tokens_details"] == {"cached_tokens": usage["input_tokens"] - 1}
