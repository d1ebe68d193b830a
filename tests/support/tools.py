"""Tools of requests, as clients send them, and the names that clients of the tests use."""

from typing import Any

MODEL = "tiny"
KEY = "no key is asked for"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def function(name: str, parameters: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [function("keep"), function("drop", None)]
NAMED = {"type": "function", "function": {"name": "keep"}}
ANTHROPIC = [{"name": "keep", "description": "Keeps.", "input_schema": SCHEMA}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
GET_TOOLS = [function("get", CITY)]
