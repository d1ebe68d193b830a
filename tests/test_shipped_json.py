"""The shipped Python pair writes JSON by schema: all of it valid, with drafts and without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.options import Options

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
NAME = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 120}
PRICE = {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5}
"""Without a step a number may have digits without end."""


def record(**properties: Any) -> dict[str, Any]:
    """An object that has just these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


SCHEMAS: list[dict[str, Any]] = [
    record(name=NAME, age=COUNT, active={"type": "boolean"}),
    record(tags={"type": "array", "items": NAME, "minItems": 1, "maxItems": 3}),
    record(kind={"enum": ["list", "tuple", None, 3]}, of=record(size=COUNT)),
    record(path={"type": "string", "pattern": "^[a-z]{1,8}/[a-z_]{1,8}\\.py$"}, lines=COUNT),
    {
        "anyOf": [
            record(error=NAME),
            record(result={"type": "array", "items": COUNT, "maxItems": 4}),
        ]
    },
    record(day={"type": "string", "format": "date"}, price=PRICE),
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(value=COUNT)},
    },
]


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """By the keys of JSON Schema that SCHEMAS have, and no others."""
    left = dict(schema)
    checks = {
        "$defs": lambda said: True,
        "$ref": lambda said: is_valid(value, root["$defs"][said.removeprefix("#/$defs/")], root),
        "type": lambda said: (
            _type(value) == said or (said == "number" and _type(value) == "integer")
        ),
        "enum": lambda said: value in said,
        "anyOf": lambda said: any(is_valid(value, one, root) for one in said),
        "properties": lambda said: all(
            is_valid(v, said.get(k, {}), root) for k, v in value.items()
        ),
        "required": lambda said: set(said) <= set(value),
        "additionalProperties": lambda said: set(value) <= set(schema["properties"]),
        "items": lambda said: all(is_valid(each, said, root) for each in value),
        "minItems": lambda said: len(value) >= said,
        "maxItems": lambda said: len(value) <= said,
        "maxLength": lambda said: len(value) <= said,
        "minimum": lambda said: value >= said,
        "maximum": lambda said: value <= said,
        "multipleOf": lambda said: value % said == 0,
        "pattern": lambda said: re.search(said, value) is not None,
        "format": lambda said: re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None,
    }
    kind = left.pop("type", None)
    if kind is not None and not checks["type"](kind):
        return False
    return all(checks[key](said) for key, said in left.items())


def _type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return kinds.get(type(value), "array" if isinstance(value, list) else "object")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load(WEIGHTS / "py-llama", WEIGHTS / "py-llama-draft")


def check(pair: Pair, seeds: range) -> None:
    for seed in seeds:
        schema = SCHEMAS[seed % len(SCHEMAS)]
        options = Options(
            json_schema=schema,
            temperature=(0.0, 0.7, 1.0, 2.0)[seed % 4],
            seed=seed,
            max_tokens=300,
            num_draft=(0, 2, 5)[seed % 3],
            rule=("coupled", "token", "block")[seed % 3] if seed % 2 else None,
            cost_cache=False,
        )
        result = generate(pair, "def read(path):\n    return ", options)
        assert result.finish_reason != "length"
        value = json.loads(result.text)
        assert is_valid(value, schema, schema), (seed, result.text)
        assert (
            result.text == json.dumps(value, ensure_ascii=False)
            or "\\" in result.text
            or ("price" in result.text)
        )


def test_texts_of_the_shipped_model_are_valid(pair: Pair) -> None:
    check(pair, range(7))


@pytest.mark.slow
def test_every_schema_is_kept_to_at_every_temperature_and_under_every_rule(pair: Pair) -> None:
    """In pairs: of seven, four and three each two meet within 28 seeds."""
    check(pair, range(len(SCHEMAS) * 4))


def test_the_checker_notices_what_is_wrong() -> None:
    wrong = [
        {"name": "x", "age": 3},
        {"tags": []},
        {"kind": "set", "of": {"size": 1}},
        {"path": "a/b.pyc", "lines": 1},
        {"error": "x", "result": []},
        {"day": "today", "price": 1},
        {"value": "1"},
    ]
    for value, schema in zip(wrong, SCHEMAS, strict=True):
        assert not is_valid(value, schema, schema)
    right = {"name": "x", "age": 3, "active": True}
    assert is_valid(right, SCHEMAS[0], SCHEMAS[0])
