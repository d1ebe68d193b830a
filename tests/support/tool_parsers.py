"""Readers of tool calls in one format."""

from __future__ import annotations

import importlib

from mlx_specdec.text.markers import CallFormat, Marker
from mlx_specdec.text.tool_formats import FORMATS

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
    own = FORMATS.get(name)
    if own is not None:
        begin, end = Marker(own.begin, (7,)), Marker(own.end, (8,))
        return CallFormat(name, begin, end, own.parse, {}, own.also, own.bare)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    begin, end = module.tool_call_start, module.tool_call_end
    return CallFormat(name, Marker(begin, (7,)), Marker(end, (8,)), module.parse_tool_call, {})
