"""Ranks on one machine write the text that one process writes, whatever drafts and decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from . import loopback

pytestmark = pytest.mark.slow
LENGTH = 24
EVERY_RULE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "rule": "token", "num_draft": 3},
    {"temperature": 1.0, "rule": "block", "num_draft": 3},
    {"temperature": 0.7, "rule": "typical", "num_draft": 3},
    {"temperature": 0.0, "delta": 0.5, "num_draft": 3},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
]
PROPOSERS: list[dict[str, Any]] = [
    {"proposer": "none"},
    {"proposer": "ngram", "ngram_min": 1},
    {"proposer": "draft", "num_draft": 4},
    {"proposer": "auto", "num_draft": "auto"},
    {"proposer": "draft", "num_draft": 3, "stop": "t7"},
]
BATCHES: list[dict[str, Any]] = [
    {"prompts": [" ".join(loopback.PROMPT.split()[at:]) for at in range(6)], "temperature": t}
    for t in (0.0, 1.0)
]


def compared(
    directory: Path, name: str, count: int, mode: str, cases: list[dict[str, Any]], **more: Any
) -> list[dict[str, Any]]:
    """What `cases.py` has found; the texts are the same."""
    changes = {"num_hidden_layers": 4, "intermediate_size": 64} | more.pop("changes", {})
    target = loopback.write(name, directory / "target", **changes)
    draft = loopback.write(name, directory / "draft", noise=0.1, **changes)
    spec = {
        "target": str(target),
        "draft": str(draft),
        "distributed": mode,
        "prompt": loopback.PROMPT,
        "cases": [{"max_tokens": LENGTH, "seed": 3} | case for case in cases],
        "out": str(directory / "found.json"),
        **more,
    }
    file = directory / "spec.json"
    file.write_text(json.dumps(spec))
    ended = loopback.run(directory, count, "-m", "tests.ranks.cases", str(file))
    assert [each.code for each in ended] == [0] * count, [each.err for each in ended]
    found: list[dict[str, Any]] = json.loads(Path(spec["out"]).read_text())
    for case, each in zip(cases, found, strict=True):
        assert each["texts"] == each["expected"], case
        assert any(each["texts"]), case
    return found


def test_two_ranks_write_the_text_of_one_under_every_rule_and_proposer(tmp_path: Path) -> None:
    cases = [*EVERY_RULE, *PROPOSERS, *BATCHES]
    found = compared(tmp_path, "llama", 2, "tensor", cases)
    assert any(each.get("accepted") for each in found)


def test_four_ranks_do(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 4}
    cases = [case | {"max_tokens": 6} for case in (*EVERY_RULE[1:3], BATCHES[0])]
    compared(tmp_path, "llama", 4, "tensor", cases, changes=changes)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("qwen2", "tensor"),
        ("qwen2", "pipeline"),
        ("qwen3_moe", "tensor"),
        ("qwen3_moe", "pipeline"),
        ("gpt_oss", "tensor"),
        ("deepseek_v3", "tensor"),
        ("deepseek_v3", "pipeline"),
    ],
)
def test_so_do_other_families(tmp_path: Path, name: str, mode: str) -> None:
    compared(tmp_path, name, 2, mode, [*EVERY_RULE[:3], PROPOSERS[1], PROPOSERS[3], BATCHES[1]])


def test_ranks_that_are_slow_and_round_otherwise_change_nothing(tmp_path: Path) -> None:
    disturbed = {"1": {"noise": 1e-6, "sleep": 0.02}, "0": {"noise": 0.0, "sleep": 0.005}}
    compared(tmp_path, "llama", 2, "tensor", [*EVERY_RULE[:4], *PROPOSERS], disturbed=disturbed)


def test_a_round_takes_one_sum_more_than_its_pass(tmp_path: Path) -> None:
    layers, every = 4, [{"proposer": "none"}, {"proposer": "draft", "num_draft": 4}]
    plain, drafted = compared(tmp_path, "llama", 2, "tensor", every)
    for each in (plain, drafted):
        # And one for the prompt's chunk with its two sums a layer, and one to wait for it.
        assert each["sums"] == (each["passes"] + 1) * (2 * layers + 1) + 1
