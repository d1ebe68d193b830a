"""The table of pairs: families that can be loaded, the formula of gains, and the choice for
`--model auto`."""

import importlib
import json
from pathlib import Path

import pytest

import mlx_specdec
from mlx_specdec.core import worth
from mlx_specdec.engine.known_pairs import BITS, COMPETING, DRAFT, USES, best_for, known_pairs, mac
from mlx_specdec.models import families

TABLE = json.loads((Path(mlx_specdec.__file__).parent / "pairs.json").read_text(encoding="utf-8"))


def test_every_model_of_the_table_has_a_family_that_can_be_loaded() -> None:
    utils = importlib.import_module("mlx_lm.utils")
    for one in known_pairs():
        for model in (one.target, one.draft):
            if not model.type:
                assert model is one.draft and one.kind != DRAFT
            elif not families.is_encoder_decoder({"model_type": model.type}):
                assert utils._get_classes({"model_type": model.type}), model


def test_estimates_are_expected_tokens_for_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the formula that chooses draft lengths."""
    [pair] = [one for one in known_pairs() if one.draft.name == "amazon/gpt-oss-120b-p-eagle"]
    monkeypatch.setattr(worth, "values", lambda chances, costs: iter((1.0, 10 * sum(chances))))
    assert pair.tokens is not None
    assert pair.gain(4, "chat") == pytest.approx(10 * (pair.tokens - 1))


def test_the_choice_gains_most_of_what_is_meant_for_the_use_and_large_enough() -> None:
    known = known_pairs()
    assert len(known) == len(TABLE["pairs"])
    for size in (8, 12, 16, 24, 32, 48, 64, 96, 128):
        for use in USES:
            machine = mac(f"{size}GB")
            chosen, bits = best_for(use, machine)
            gain = chosen.gain(bits, use)
            assert use in chosen.uses and gain is not None
            for one in known:
                for n in {*BITS[:2]} & {*one.target.bits}:
                    other = one.gain(n, use)
                    fits = one.nbytes(n, False) <= machine.auto_room
                    if use in one.uses and other and fits:
                        assert chosen.target.size >= COMPETING * one.target.size
                        small = one.target.size < chosen.target.size
                        assert other <= gain + 0.005 or small, (one, n)
