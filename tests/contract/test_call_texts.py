"""Calls in the varieties of each format are read from whatever tokens a model writes them with."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ..support.tooled import GET_TOOLS
from .call_texts import TEXTS, Said
from .zoo import AGAIN, CHAT, Model, joined


def said(message: Any) -> Said:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return (
        message["content"] or "",
        message.get("reasoning_content") or "",
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


@pytest.mark.parametrize("at", range(len(TEXTS)), ids=lambda at: f"{at}-{TEXTS[at][1][:30]}")
def test_a_text_means_the_same_in_any_tokens(models: Callable[[str], Model], at: int) -> None:
    format, _, expected = TEXTS[at]
    model = models(f"texts-{format}")
    for again in AGAIN:
        message = {"role": "user", "content": f"<<{at}{again}>>"}
        body = {"messages": [message], "tools": GET_TOOLS}
        choice = model.choice(CHAT, **body)
        assert said(choice["message"]) == expected
        assert said(joined(model.streamed(CHAT, **body))) == expected
        assert choice["finish_reason"] == ("tool_calls" if expected[2] else "stop")
