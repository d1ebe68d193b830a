"""Readers of tool calls in one format."""

from mlx_specdec.text.markers import CallFormat, Marker
from mlx_specdec.text.tool_formats import format_named

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def of_parser(name: str) -> CallFormat:
    found = format_named(name)
    return CallFormat(name, found, Marker(found.begin, (7,)), Marker(found.end, (8,)))
