"""Calls in the varieties of each format are read from whatever tokens a model writes them with."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ..support.tools import GET_TOOLS
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
    body: dict[str, Any] = {"tools": GET_TOOLS}
    first, second = ([{"role": "user", "content": f"<<{at}{again}>>"}] for again in AGAIN)
    choice = model.choice(CHAT, messages=first, **body)
    assert said(choice["message"]) == expected
    assert choice["finish_reason"] == ("tool_calls" if expected[2] else "stop")
    assert said(joined(model.streamed(CHAT, messages=second, **body))) == expected
