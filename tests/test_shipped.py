"""The heads and drafters in weights/ load with their targets, are small, and save passes.

That they change no text is part of test_same_text.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, Pair, generate, load
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.drafters.kinds import read

from .support.shipped import ROOT, prompts

WEIGHTS = ROOT / "weights"
HEADS = ("py-llama-medusa", "t5-enfr-medusa")
DRAFTERS = {"py-llama-dspark": "dspark", "t5-enfr-eagle3": "eagle3"}
"""Their kinds."""


@functools.cache
def loaded(name: str) -> Pair:
    if name in HEADS:
        return load(WEIGHTS / name)
    return load(WEIGHTS / name.removesuffix(f"-{DRAFTERS[name]}"), WEIGHTS / name)


def size(directory: Path) -> int:
    """In bytes."""
    return sum(file.stat().st_size for file in directory.iterdir())


@pytest.mark.parametrize("name", HEADS)
def test_heads_bring_their_base_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads((WEIGHTS / name / "config.json").read_text())
    assert config["base_model_name_or_path"] == f"../{name.removesuffix('-medusa')}"
    pair = load(WEIGHTS / name)
    assert pair.heads is not None and pair.heads.count == 3
    assert not pair.heads.own_output
    assert size(WEIGHTS / name) < 1_000_000


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_recognized_by_its_files_and_small(name: str) -> None:
    speculator = loaded(name).drafter_network
    assert speculator is not None and speculator.kind == DRAFTERS[name]
    assert size(WEIGHTS / name) < 4_000_000


def test_each_drafter_is_refused_for_the_others_target() -> None:
    """Their widths and vocabularies are the same."""
    for name, other in itertools.permutations(DRAFTERS):
        files = read(WEIGHTS / name)
        assert files is not None
        target = WEIGHTS / other.removesuffix(f"-{DRAFTERS[other]}")
        with pytest.raises(CheckpointError, match="the drafter belongs to another target"):
            files.check_config(json.loads((target / "config.json").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "least"),
    [
        ("py-llama-medusa", "python.jsonl", 2.0),
        ("py-llama-dspark", "python.jsonl", 2.0),
        ("t5-enfr-eagle3", "translation.jsonl", 1.2),
    ],
)
def test_a_greedy_pass_brings_several_tokens(name: str, file: str, least: float) -> None:
    options = Options(max_tokens=40, num_draft=3, proposer=DRAFTERS.get(name), cost_cache=False)
    results = [generate(loaded(name), prompt, options) for prompt in prompts(file, 3)]
    passes = sum(result.stats.target_passes for result in results)
    assert sum(len(result.tokens) for result in results) >= least * passes


# The shipped Python pair writes JSON by schema: all of it valid, with drafts and without.


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
