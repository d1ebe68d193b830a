"""The table of pairs: families that can be loaded, the formula of speeds, and the choice for
`--model auto`."""

import importlib
import json
import math
import re
import runpy
from pathlib import Path

import mlx_specdec
from mlx_specdec.engine.known_pairs import (
    BITS,
    DRAFT,
    ENOUGH,
    FAST,
    MTP,
    SAME,
    USES,
    best_for,
    known_pairs,
    mac,
)
from mlx_specdec.models.loading import is_encoder_decoder

ROOT = Path(mlx_specdec.__file__).parents[1]
TABLE = json.loads((Path(mlx_specdec.__file__).parent / "pairs.json").read_text(encoding="utf-8"))


def test_every_model_of_the_table_has_a_family_that_can_be_loaded() -> None:
    utils = importlib.import_module("mlx_lm.utils")
    for one in known_pairs():
        for model in (one.target, one.draft):
            if not model.type:
                assert model is one.draft and one.kind != DRAFT
            elif not is_encoder_decoder({"model_type": model.type}):
                assert utils._get_classes({"model_type": model.type}), model


def test_the_speeds_are_those_that_the_script_computes() -> None:
    """Run benchmarks/fill_pairs.py after a change of the figures in the table."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "fill_pairs.py"))
    for pair in TABLE["pairs"]:
        assert pair.get("speeds", {}) == script["speeds"](pair, TABLE), pair


def test_the_quality_class_follows_from_size_and_age() -> None:
    """A class from 20, 8, 3 and 2 billion weights on; one class lower before 2026."""
    for pair in known_pairs():
        target = pair.target
        size = math.sqrt(target.billions * (target.active or target.billions))
        young = "ABCDE"[sum(size < least for least in (20, 8, 3, 2))]
        older = "ABCDE"[min(4, "ABCDE".index(young) + 1)]
        assert target.quality in (young, older), target
        if re.search(r"Qwen3\.[5-8]|gemma-4|Ornith|LFM2\.5|MiniCPM5|Muse|GLM-4\.7", target.name):
            assert target.quality == young, target


def test_the_choice_is_the_fastest_of_the_best_class_that_is_fast_enough() -> None:
    known = known_pairs()
    assert len(known) == len(TABLE["pairs"])
    for described in ("8GB", "16GB", "M4 16GB", "M3 Pro 36GB", "M4 32GB", "M1 16GB", "M2 Max 64GB"):
        machine = mac(described)
        for use in (*USES, FAST):
            purpose = USES[0] if use == FAST else use
            chosen, bits = best_for(use, machine)
            speed = machine.speed * chosen.speed(bits, purpose)
            assert purpose in chosen.uses and chosen.pays(bits, purpose, machine)
            for one in known:
                for n in BITS:
                    if purpose not in one.uses or not one.pays(n, purpose, machine):
                        continue
                    other = machine.speed * one.speed(n, purpose)
                    if other > speed / SAME + 0.01:
                        lower = one.target.quality > chosen.target.quality
                        assert use != FAST and lower and speed >= ENOUGH, (described, one, n)
                    elif use != FAST and one.target.quality < chosen.target.quality:
                        assert other < ENOUGH, (described, one, n)


def test_slow_rows_exclude_gains_of_quantized_models() -> None:
    """On M1 and M2, except for what was measured there."""
    machine = mac("M1 Max 64GB")
    paying = {
        (one.target.name, one.kind, n)
        for one in known_pairs()
        for n in BITS[:2]
        if one.pays(n, USES[0], machine)
    }
    assert paying == {("Qwen/Qwen3.8-27B", MTP, 4)}
