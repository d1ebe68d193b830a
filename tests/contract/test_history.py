"""Every API gives the model the history that clients send, with a note for what is not text."""

from collections.abc import Iterator
from typing import Any

import pytest

from .support import Answer, Server, checkpoint, served

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    '<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "Who?"}
NEXT = {"role": "user", "content": "And?"}
SAID = {"role": "assistant", "content": "Nobody."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL_USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "data": "aGk="}}
CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
APIS = (CHAT, MESSAGES, OLLAMA)


def note(kind: str) -> str:
    return f"[{kind} left out: this model reads only text]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = checkpoint(
        tmp_path_factory.mktemp("model"),
        template=TEMPLATE,
        tokens=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    )
    with served("--model", directory) as running:
        yield running


def ask(server: Server, path: str, messages: list[Any], **more: Any) -> Answer:
    most = {"options": {"num_predict": 1}, "stream": False} if path == OLLAMA else {"max_tokens": 1}
    return server.ask(path, {"messages": messages, **most, **more})


def prompt_tokens(server: Server, path: str, messages: list[Any], **more: Any) -> int:
    """Return the number of tokens that an API counts in the prompt of these messages."""
    answer = ask(server, path, messages, **more)
    assert answer.status == 200, answer.body
    if path == OLLAMA:
        return int(answer.json["prompt_eval_count"])
    usage = answer.json["usage"]
    if path == CHAT:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


def expected_tokens(server: Server, prompt: str) -> int:
    """Return the number of tokens of a prompt that a template has written, which adds no token."""
    count, added = (server.ok("/tokenize", prompt=text)["count"] for text in (prompt, "x"))
    return int(count - (added - 1))


def prompt_of(server: Server, messages: list[Any], **more: Any) -> str:
    return str(server.ok("/apply-template", messages=messages, **more)["prompt"])


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"thinking": "Hm."},
        {"reasoning_content": "", "reasoning": "Hm."},
        {"reasoning": None, "thinking": "Hm."},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "signature": "s"}]},
        {
            "reasoning_content": "",
            "reasoning_details": [
                {"type": "reasoning.summary", "summary": "H"},
                {"type": "reasoning.encrypted", "data": "s"},
                {"type": "reasoning.text", "text": "m."},
            ],
        },
    ],
    ids=lambda fields: "-".join(fields),
)
def test_reasoning_reaches_the_template_under_every_name(
    server: Server, fields: dict[str, Any]
) -> None:
    prompt = "[user]Who?[assistant]<think>Hm.</think>Nobody.[user]And?[assistant]"
    messages = [USER, {**SAID, **fields}, NEXT]
    assert prompt_of(server, messages) == prompt
    for path in (CHAT, OLLAMA):
        assert prompt_tokens(server, path, messages) == expected_tokens(server, prompt)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, IMAGE], f"a\n{note('image')}"),
        ([{"type": "tool_reference", "tool_name": "g"}], note("tool_reference")),
        ([PDF, {"type": "text", "text": "b"}], f"{note('document')}\nb"),
    ],
    ids=["image", "reference", "pdf"],
)
def test_a_result_of_a_tool_with_other_parts_goes_on(
    server: Server, content: list[Any], text: str
) -> None:
    called = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    prompt = f"[user]Who?[assistant]{called}[tool]{text}[assistant]"
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    messages = [
        USER,
        {"role": "assistant", "content": [TOOL_USE]},
        {"role": "user", "content": [result]},
    ]
    assert prompt_tokens(server, MESSAGES, messages) == expected_tokens(server, prompt)


def test_parts_of_earlier_messages_become_notes(server: Server) -> None:
    refusal = {"type": "refusal", "refusal": "No."}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, IMAGE_URL]},
        {"role": "assistant", "content": [refusal]},
        USER,
        {"role": "assistant", "content": None, "refusal": "Never."},
        USER,
        CALLED,
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "a"}, IMAGE_URL],
        },
        NEXT,
    ]
    called = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    prompt = (
        f"[user]Look\n{note('image_url')}[assistant]No.[user]Who?[assistant]Never.[user]Who?"
        f"[assistant]{called}[tool]a\n{note('image_url')}[user]And?[assistant]"
    )
    assert prompt_of(server, chat) == prompt
    assert prompt_tokens(server, CHAT, chat) == expected_tokens(server, prompt)
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    blocks = [
        {"role": "user", "content": [IMAGE, PDF, {"type": "text", "text": "Look"}]},
        {"role": "assistant", "content": [search, found, {"type": "text", "text": "No."}]},
        NEXT,
    ]
    prompt = (
        f"[user]{note('image')}\n{note('document')}\nLook[assistant]{note('server_tool_use')}\n"
        f"{note('web_search_tool_result')}\nNo.[user]And?[assistant]"
    )
    assert prompt_tokens(server, MESSAGES, blocks) == expected_tokens(server, prompt)
    images = [{**USER, "images": ["aGk="]}, SAID, NEXT]
    prompt = f"[user]Who?\n{note('image')}[assistant]Nobody.[user]And?[assistant]"
    assert prompt_tokens(server, OLLAMA, images) == expected_tokens(server, prompt)


def test_only_the_newest_message_of_the_user_is_refused(server: Server) -> None:
    last: dict[str, Any] = {
        CHAT: {"role": "user", "content": [IMAGE_URL]},
        MESSAGES: {"role": "user", "content": [IMAGE]},
        OLLAMA: {"role": "user", "content": "Look", "images": ["aGk="]},
    }
    for path in APIS:
        refused = ask(server, path, [USER, SAID, last[path]])
        assert refused.status == 400 and b"reads only text" in refused.body, refused.body
        assert ask(server, path, [last[path], USER]).status == 200
