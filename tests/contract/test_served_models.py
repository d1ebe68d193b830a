"""What a server says of its models: lines for clients that can use them, and errors of loading."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import PATIENCE, Answer, Server, checkpoint, served

CALLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{% set tool_call = call.function %}<tool_call>{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}'
)
ANY = ["Browser", "OpenAI SDK"]
CHATS = ["Cline", "Continue"]
AGENTS = ["Codex", "Claude Code", *CHATS, "opencode"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model that calls tools, one that chats, and one that cannot be loaded."""
    directory = tmp_path_factory.mktemp("models")
    tokens = ("<tool_call>", "</tool_call>")
    checkpoint(directory / "calls", template=CALLS, tokens=tokens)
    checkpoint(directory / "chats", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    checkpoint(directory / "plain")
    broken = checkpoint(directory / "broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1000])
    return directory


@pytest.fixture(scope="module")
def several(models: Path) -> Iterator[Server]:
    names = ("plain", "chats", "calls", "broken")
    with served(*(word for name in names for word in ("--model", models / name))) as running:
        yield running


def clients(server: Server, count: int, about: str = "") -> list[str]:
    """Wait for a number of printed lines, and return the clients of those with a text."""
    end = time.monotonic() + PATIENCE
    while len(server.printed) < count:
        assert time.monotonic() < end, server.printed
        time.sleep(0.02)
    return [line[:12].strip() for line in server.printed if about in line]


def load(server: Server, name: str) -> Answer:
    """Ask for a model, which is loaded first or cannot be loaded."""
    return server.ask("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 0})


def test_every_line_names_its_model(several: Server) -> None:
    assert clients(several, 2) == ANY
    for name in ("plain", "chats", "calls"):
        assert load(several, name).status == 200
    assert clients(several, 9) == [*ANY, *CHATS, *AGENTS]
    assert clients(several, 9, "calls") == AGENTS
    assert clients(several, 9, "chats") == CHATS
    assert clients(several, 9, "plain") == []
    assert not any(
        "API_KEY" in line.replace("OPENAI_API_KEY=unused", "") for line in several.printed
    )


def test_clients_do_not_see_paths_in_an_error_of_loading(several: Server, models: Path) -> None:
    answer = load(several, "broken")
    assert answer.status == 500
    message = "broken cannot be used: the server's log says why"
    assert answer.json["error"]["message"] == message
    assert str(models) not in answer.body.decode()
    end = time.monotonic() + PATIENCE
    while not any(str(models / "broken") in line for line in several.log):
        assert time.monotonic() < end, several.log
        time.sleep(0.02)
