"""Ranks on one machine write the text that one process writes, whatever drafts and decides."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import load

from ..support import loopback, mtp, tiny
from .cases import told

pytestmark = pytest.mark.slow
LENGTH = 16
WITH_MTP = "qwen3_5"
"""A family that drafts for itself."""
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


@dataclass(frozen=True)
class Setting:
    """A target that ranks share, and what is asked of it. changes: of its config. disturbed: how,
    by rank; what comes later in the same processes is disturbed as well."""

    name: str
    mode: str
    cases: list[dict[str, Any]]
    changes: dict[str, int] = field(default_factory=dict)
    disturbed: dict[str, dict[str, float]] = field(default_factory=dict)


WITHOUT_A_DRAFT: list[dict[str, Any]] = [
    {"temperature": temperature, **drafting}
    for temperature in (0.0, 1.0)
    for drafting in (
        {"proposer": "none"},
        {"proposer": "mtp", "num_draft": 1},
        {"proposer": "ngram", "ngram_min": 1, "num_draft": 3},
    )
]
SOME = [EVERY_RULE[1], PROPOSERS[2], BATCHES[1]]
FAMILIES = [
    Setting("qwen2", "tensor", SOME),
    Setting("qwen2", "pipeline", SOME),
    Setting("qwen3_moe", "tensor", SOME),
    Setting("qwen3_moe", "pipeline", SOME),
    Setting("gpt_oss", "tensor", SOME),
    Setting("deepseek_v3", "tensor", SOME),
    Setting("deepseek_v3", "pipeline", SOME),
    # Recurrent state beside keys and values, so that what is rejected is replayed.
    Setting(WITH_MTP, "tensor", WITHOUT_A_DRAFT),
]
DISTURBED = {"1": {"noise": 1e-6, "sleep": 0.02}, "0": {"noise": 0.0, "sleep": 0.005}}


def compared(directory: Path, count: int, settings: list[Setting]) -> list[dict[str, Any]]:
    """What ranks were told, case by case; the texts are those of one process."""
    asked, wanted = [], []
    expected: dict[str, list[list[str]]] = {}
    for setting in settings:
        changes = {"num_hidden_layers": 4, "intermediate_size": 64} | setting.changes
        target = directory / f"{setting.name}-target"
        draft = None if setting.name == WITH_MTP else directory / f"{setting.name}-draft"
        if draft is None:
            mtp.write(setting.name, target, vocabulary=tiny.VOCABULARY)
            loopback.add_words(target)
        elif not target.exists():
            loopback.write(setting.name, target, **changes)
            loopback.write(setting.name, draft, noise=0.1, **changes)
        cases = [{"max_tokens": LENGTH, "seed": 3} | case for case in setting.cases]
        asked.append(
            {
                "target": str(target),
                "draft": None if draft is None else str(draft),
                "mode": setting.mode,
                "cases": cases,
                "disturbed": setting.disturbed,
            }
        )
        pair = load(target, draft)
        for case in cases:
            key = f"{setting.name} {json.dumps(case)}"
            if key not in expected:
                expected[key] = told(pair, loopback.PROMPT, case)["texts"]
            wanted.append((setting, case, expected[key]))
    out, file = directory / "told.json", directory / "spec.json"
    file.write_text(json.dumps({"prompt": loopback.PROMPT, "settings": asked, "out": str(out)}))
    ended = loopback.run(directory, count, "-m", "tests.ranks.cases", str(file))
    assert [each.code for each in ended] == [0] * count, [each.err for each in ended]
    written: list[dict[str, Any]] = json.loads(out.read_text())
    for (setting, case, texts), each in zip(wanted, written, strict=True):
        assert each["texts"] == texts, (setting, case)
        assert any(texts), (setting, case)
    return written


def test_two_ranks_write_the_text_of_one_under_every_rule_and_proposer(tmp_path: Path) -> None:
    """And where ranks are slow and round otherwise; a round takes one sum more than its pass."""
    cases = [*EVERY_RULE, *PROPOSERS, *BATCHES]
    some = [*EVERY_RULE[:4], *PROPOSERS]
    settings = [
        Setting("llama", "tensor", cases),
        Setting("llama", "tensor", some, disturbed=DISTURBED),
    ]
    written = compared(tmp_path, 2, settings)
    assert any(each.get("accepted") for each in written)
    layers = 4
    for case in ({"proposer": "none"}, {"proposer": "draft", "num_draft": 4}):
        each = written[cases.index(case)]
        # And one for the prompt's chunk with its two sums a layer, and one to wait for it.
        assert each["sums"] == (each["passes"] + 1) * (2 * layers + 1) + 1


def test_so_do_other_families(tmp_path: Path) -> None:
    """In the same processes, since to start them takes seconds."""
    compared(tmp_path, 2, FAMILIES)


def test_four_ranks_do(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 4}
    cases = [case | {"max_tokens": 6} for case in (EVERY_RULE[1], BATCHES[0])]
    compared(tmp_path, 4, [Setting("llama", "tensor", cases, changes)])
