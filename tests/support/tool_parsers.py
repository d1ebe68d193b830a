"""Readers of tool calls in one of mlx-lm's formats."""

from __future__ import annotations

import importlib

from mlx_specdec.text.markers import CallFormat, Marker

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
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    begin, end = module.tool_call_start, module.tool_call_end
    return CallFormat(name, Marker(begin, (7,)), Marker(end, (8,)), module.parse_tool_call, {})
