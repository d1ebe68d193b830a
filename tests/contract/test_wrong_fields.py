"""A request with a wrong field is refused before anything is decoded, and the error names the
field."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.tools import function
from .zoo import CHAT, COMPLETIONS, MESSAGES, RESPONSES, USER, Model

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

TOO_LONG = "context_length_exceeded"
BRACKETS = "root ::= " + "(" * 9999
TABLES: dict[str, list[list[Any]]] = json.loads(
    Path(__file__).with_name("wrong_fields.json").read_text()
)
"""Model and endpoint -> wrong fields, the field that the error names, words of its message, and its
code. `both` has those of texts that are bound to something."""
BOUND: list[list[Any]] = [
    *TABLES.pop("both"),
    [{"grammar": BRACKETS}, "grammar", "too many brackets"],
    [{"structured_outputs": {"json": "[" * 9999}}, "structured_outputs", "more than 64 deep"],
    [{"regex": "a" * 65537}, "regex", "more than 65536 bytes"],
]
TABLES[f"tiny {COMPLETIONS}"] += [
    *BOUND,
    [{"stop": ["a"] * 16_385}, "stop", "at most 16384 items"],
    [{"prompt": [7] * 4096}, "prompt", "", TOO_LONG],
]
TABLES[f"talks {CHAT}"] += [
    *BOUND,
    [{"messages": [USER] * 16_385}, "messages", "at most 16384 items"],
    [{"tools": [function(f"f{at}") for at in range(16_385)]}, "tools", "at most 16384"],
]
TABLES[f"talks {RESPONSES}"].append([{"input": "word " * 2000}, "input", "", TOO_LONG])
TABLES[f"translator {COMPLETIONS}"].append([{"prompt": [5] * 5000}, "prompt", "", TOO_LONG])
WITHOUT: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
    "/infill": {},
}


def cases() -> Iterator[Any]:
    for place, table in TABLES.items():
        model, path = place.split()
        for at, (fields, *rest) in enumerate(table):
            name = f"{model}{path}-{at}-{'-'.join(fields)}"
            yield pytest.param(model, path, fields, *rest, *("", None)[len(rest) - 1 :], id=name)


@pytest.mark.parametrize(("model", "path", "fields", "param", "said", "code"), [*cases()])
def test_a_wrong_field_is_named(
    models: Callable[[str], Model],
    model: str,
    path: str,
    fields: dict[str, Any],
    param: str | None,
    said: str,
    code: str | None,
) -> None:
    body = {"max_tokens": 4, **WITHOUT[path], **fields, "stream": fields.get("stream", True)}
    body = {"model": model, **{name: body[name] for name in body if body[name] is not None}}
    # JSON has no number like 1e400, but Python reads it as infinity.
    answer = models(model).server.ask(path, json.dumps(body).encode())
    assert answer.status == 400, answer
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    assert error.get("param") == param and said in error["message"], error
    assert code == error.get("code")
    assert error["message"] and "\n" not in error["message"]
