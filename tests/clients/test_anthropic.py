"""Anthropic's own client: messages, streams, tools, thoughts."""

import pytest

pytest.importorskip("anthropic", reason="the extra clients is not installed")

import anthropic

from ..support.tools import ANTHROPIC, KEY, MODEL

GREEDY = {"temperature": 0}
"""Newer models of theirs take no temperature, and neither does their client."""
BODY = {"model": MODEL, "max_tokens": 30, "messages": [{"role": "user", "content": "Who?"}]}


@pytest.fixture(scope="module")
def client(root: str):
    return anthropic.Anthropic(base_url=root, api_key=KEY, max_retries=0)


def test_a_message_and_its_stream(client) -> None:
    body = {**BODY, "extra_body": GREEDY}
    whole = client.messages.create(**body)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 30
    with client.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().content[0].text == whole.content[0].text
    assert (
        client.messages.count_tokens(model=MODEL, messages=BODY["messages"]).input_tokens
        == whole.usage.input_tokens
    )


def test_tools(client) -> None:
    choice = {"type": "tool", "name": "keep"}
    body = {**BODY, "max_tokens": 200, "tools": ANTHROPIC, "tool_choice": choice}
    with client.messages.stream(**body, extra_body=GREEDY) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**body, extra_body=GREEDY)
    [used] = [each for each in whole.content if each.type == "tool_use"]
    assert used.input.keys() == {"name", "age"} and whole.stop_reason == "tool_use"
    assert [each.input for each in streamed.content if each.type == "tool_use"] == [used.input]
    answered = [
        *BODY["messages"],
        {"role": "assistant", "content": [each.model_dump() for each in whole.content]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "kept"}],
        },
    ]
    assert client.messages.create(**{**BODY, "messages": answered}, tools=ANTHROPIC).content


def test_thoughts(thinking: str) -> None:
    client = anthropic.Anthropic(base_url=thinking, api_key=KEY, max_retries=0)
    body = {**BODY, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    [whole] = client.messages.create(**body, extra_body=GREEDY).content
    assert whole.type == "thinking" and whole.thinking
    with client.messages.stream(**body, extra_body=GREEDY) as stream:
        assert stream.get_final_message().content[0].thinking == whole.thinking


def test_errors_have_their_classes(client) -> None:
    # A name of theirs is answered by the model that is served.
    assert client.messages.create(**{**BODY, "model": "claude"}).model == MODEL
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**BODY, extra_body={"temperature": -1})
