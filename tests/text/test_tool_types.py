"""The types of parameters, in the ways in which schemas say them."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_specdec.text.markers import typed, with_types

ROOT = {
    "$defs": {
        "mood": {"enum": ["calm", "cross"]},
        "age": {"$ref": "#/$defs/years"},
        "years": {"type": "integer", "maximum": 9},
        "round": {"$ref": "#/$defs/round"},
    }
}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "number"}, "number"),
        ({"type": ["null", "boolean"]}, "boolean"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer"),
        ({"anyOf": [{"$ref": "#/$defs/age"}, {"type": "null"}]}, "integer"),
        ({"allOf": [{"$ref": "#/$defs/mood"}], "description": "x"}, "string"),
        ({"const": 1.5}, "number"),
        ({"enum": [True, None]}, "boolean"),
        ({"enum": ["a", 1]}, None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, None),
        ({"type": ["integer", "string"]}, ["integer", "string"]),
        ({"$ref": "#/$defs/round"}, None),
        ({"$ref": "#/elsewhere"}, None),
        ({"type": 5}, 5),
        ({"type": [5]}, [5]),
        ({"anyOf": [{"type": {}}, {"type": "null"}]}, {}),
        ({}, None),
        (True, None),
    ],
    ids=str,
)
def test_a_type_is_named_where_there_is_one(schema: Any, kind: Any) -> None:
    assert typed(schema, ROOT).get("type") == kind


def test_numbers_that_may_be_missing_are_read_as_numbers() -> None:
    parser = pytest.importorskip("mlx_lm.tool_parsers.qwen3_coder")
    maybe = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    parameters = {"type": "object", "properties": {"age": maybe}}
    tools = [{"type": "function", "function": {"name": "keep", "parameters": parameters}}]
    call = "<function=keep>\n<parameter=age>\n7\n</parameter>\n</function>"
    assert parser.parse_tool_call(call, tools)["arguments"] == {"age": "7"}, "mlx-lm has mended it"
    assert parser.parse_tool_call(call, with_types(tools))["arguments"] == {"age": 7}
    bare = [{"type": "function", "function": {"name": "keep"}}]
    assert with_types(bare) == bare
