"""Calls in the varieties of each format are read from whatever tokens a model writes them with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.tooled import GET_TOOLS
from .call_texts import TEXTS, Said
from .learned import learned
from .support import Server, served
from .test_tool_calls import template_of
from .zoo import CHAT, Model, joined

LEAST = (1, 4)
"""Smallest numbers of characters of a token, for two models of each format."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root, flags = tmp_path_factory.mktemp("formats"), list[Any]()
    for format in dict.fromkeys(name for name, *_ in TEXTS):
        places = [at for at, (name, *_) in enumerate(TEXTS) if name == format]
        # Short answers come first, since all tokens of the model's answers differ.
        places.sort(key=lambda at: len(TEXTS[at][1]))
        answers = {f"<<{at}>>": TEXTS[at][1] for at in places}
        for least in LEAST:
            model = root / f"{format}-{least}"
            thoughts = ("<think>", "</think>")
            learned(model, answers, template_of(format), tokens=thoughts, least=least)
            flags += ["--model", model]
    with served(*flags, "--max-tokens", 400, "--wait-for-model") as running:
        yield running


def said(message: Any) -> Said:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return (
        message["content"] or "",
        message.get("reasoning_content") or "",
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


@pytest.mark.parametrize("at", range(len(TEXTS)), ids=lambda at: f"{at}-{TEXTS[at][1][:30]}")
def test_a_text_means_the_same_in_any_tokens(server: Server, at: int) -> None:
    format, _, expected = TEXTS[at]
    body = {"messages": [{"role": "user", "content": f"<<{at}>>"}], "tools": GET_TOOLS}
    for least in LEAST:
        model = Model(server, f"{format}-{least}", Path())
        choice = model.choice(CHAT, **body)
        assert said(choice["message"]) == expected
        assert said(joined(model.streamed(CHAT, **body))) == expected
        assert choice["finish_reason"] == ("tool_calls" if expected[2] else "stop")
