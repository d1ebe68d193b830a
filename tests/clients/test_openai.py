"""OpenAI's own client: sync, async, streams, parsed answers, tools, errors."""

import json
from typing import Literal

import pytest

pytest.importorskip("openai", reason="the extra clients is not installed")

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from ..support.tools import KEY, MODEL, NAMED, TOOLS

MESSAGES = [{"role": "user", "content": "Who?"}]
BODY = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30, "temperature": 1.0, "seed": 4}
CALLING = {**BODY, "max_tokens": 200, "tools": TOOLS, "tool_choice": NAMED}


class Person(BaseModel):
    """What answers are parsed to."""

    age: int = Field(ge=0, le=99)
    mood: Literal["calm", "cross"]


@pytest.fixture(scope="module")
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key=KEY, max_retries=0)


def test_an_answer_and_its_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(**BODY)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens == 30
    assert whole.model_extra["timings"]["draft_n"] > 0
    chunks = list(
        client.chat.completions.create(**BODY, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == text
    assert chunks[-1].usage.completion_tokens == 30 and chunks[-1].choices == []


def test_parsed_answers(client: OpenAI) -> None:
    body = {**BODY, "max_tokens": 100}
    answer = client.chat.completions.parse(**body, response_format=Person).choices[0].message
    assert isinstance(answer.parsed, Person)
    with client.chat.completions.stream(**body, response_format=Person) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == answer.parsed


def test_tools(client: OpenAI) -> None:
    choice = client.chat.completions.create(**CALLING).choices[0]
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, choice.finish_reason) == (
        "function",
        "keep",
        "tool_calls",
    )
    assert json.loads(call.function.arguments).keys() == {"name", "age"}
    with client.chat.completions.stream(**CALLING) as stream:
        kinds = [event.type for event in stream]
        [same] = stream.get_final_completion().choices[0].message.tool_calls
    assert same.function.arguments == call.function.arguments
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert "tool_calls.function.arguments.done" in kinds
    answered = [
        *MESSAGES,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "kept"},
    ]
    again = client.chat.completions.create(**{**BODY, "messages": answered}, tools=TOOLS)
    assert again.choices[0].finish_reason in ("length", "stop")


def test_completions_and_logprobs(client: OpenAI) -> None:
    body = {"model": MODEL, "prompt": "def", "max_tokens": 10, "seed": 1, "temperature": 0.7}
    plain = client.completions.create(**body).choices[0].text
    assert client.completions.create(**body, echo=True).choices[0].text == f"def{plain}"
    chunks = client.completions.create(**body, stream=True)
    assert "".join(each.choices[0].text for each in chunks) == plain
    answer = client.chat.completions.create(**BODY, logprobs=True, top_logprobs=2).choices[0]
    assert len(answer.logprobs.content) == 30 and len(answer.logprobs.content[0].top_logprobs) == 2


SEEDED = {"seed": 4}
RESPONSE = {
    "model": MODEL,
    "input": "Who?",
    "max_output_tokens": 30,
    "temperature": 1.0,
    "extra_body": SEEDED,
}
FLAT = {"type": "function", **TOOLS[0]["function"]}


def test_responses(client: OpenAI) -> None:
    assert client.responses.create(**RESPONSE).status == "incomplete"
    # The helper raises for texts that are cut at a length.
    ending = {**SEEDED, "structured_outputs": {"regex": "[a-z ]{20}"}}
    bound = {**RESPONSE, "extra_body": ending}
    whole = client.responses.create(**bound)
    assert len(whole.output_text) == 20 and whole.status == "completed"
    with client.responses.stream(**bound) as stream:
        deltas = [each.delta for each in stream if each.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    counted = client.responses.input_tokens.count(model=MODEL, input="Who?")
    assert counted.input_tokens == whole.usage.input_tokens
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**RESPONSE, previous_response_id=whole.id)


def test_tools_and_formats_of_responses(client: OpenAI) -> None:
    body = {**RESPONSE, "max_output_tokens": 200}
    parsed = client.responses.parse(**body, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    choice = {"type": "function", "name": "keep"}
    with client.responses.stream(**body, tools=[FLAT], tool_choice=choice) as stream:
        kinds = {each.type for each in stream}
        [call] = stream.get_final_response().output
    assert "response.function_call_arguments.done" in kinds
    assert json.loads(call.arguments).keys() == {"name", "age"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "kept"}
    talk = [{"role": "user", "content": "Who?"}, call.model_dump(exclude_none=True), result]
    assert client.responses.create(**{**RESPONSE, "input": talk}, tools=[FLAT]).output


def test_errors_have_their_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**BODY, tools=[{"type": "custom"}])
    assert wrong.value.param == "tools"


def test_models(client: OpenAI) -> None:
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "mlx-specdec"
