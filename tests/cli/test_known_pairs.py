"""The table of pairs: families that can be loaded, and models that `--model auto` leaves out."""

import importlib

from mlx_specdec.cli.known_pairs import BITS, COMPETING, DRAFT, USES, best_for, known_pairs, mac
from mlx_specdec.models import families


def test_every_model_of_the_table_has_a_family_that_can_be_loaded() -> None:
    utils = importlib.import_module("mlx_lm.utils")
    for one in known_pairs():
        for model in (one.target, one.draft):
            if not model.type:
                assert model is one.draft and one.kind != DRAFT
            elif not families.is_encoder_decoder({"model_type": model.type}):
                assert utils._get_classes({"model_type": model.type}), model


def test_the_choice_gains_most_of_what_is_confirmed_and_large_enough() -> None:
    known = known_pairs()
    unconfirmed = {one.target.name for one in known if one.target.unconfirmed}
    assert unconfirmed > {"Nanbeige/Nanbeige4.2-3B"}
    for size in (8, 12, 16, 24, 32, 48, 64, 96, 128):
        for use in USES:
            machine = mac(f"{size}GB")
            chosen, bits = best_for(use, None, machine)
            gain = chosen.gain(bits, use)
            assert not chosen.target.unconfirmed and gain is not None
            for one in known:
                for n in {*BITS[:2]} & {*one.target.bits}:
                    other = one.gain(n, use)
                    confirmed = use in one.uses and not one.target.unconfirmed
                    if confirmed and other and one.nbytes(n, False) <= machine.auto_room:
                        assert chosen.target.size >= COMPETING * one.target.size
                        small = one.target.size < chosen.target.size
                        assert other <= gain or small, (one, n)
