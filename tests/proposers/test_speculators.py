"""Drafters on hidden states never change the text, whatever their kind, target, rule and seed."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.errors import CheckpointError, OptionError
from mlx_specdec.models.drafters import DRAFTER_KINDS
from mlx_specdec.models.drafters.kinds import attach, read
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.proposers import DRAFTERS

from ..support import speculators
from ..support.drafter_pairs import MAKERS
from ..support.models import make_llama


def test_every_kind_that_is_read_has_a_name_to_ask_for() -> None:
    assert set(DRAFTER_KINDS) == {
        name for name, module in DRAFTERS.items() if module in ("hidden_state", "mtp")
    }
    # Gemma's assistants have targets of their own, and tests.
    assert set(DRAFTER_KINDS) == {*MAKERS, "gemma4_assistant"}


def test_a_loaded_target_takes_another_draft(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = make_llama(tmp_path / "base")
    plain = loading.load(base)
    vocabulary = plain.target.vocabulary
    one = loading.with_draft_model(plain, speculators.dflash(tmp_path / "1", vocabulary=vocabulary))
    two = loading.with_draft_model(one, base, dtype="float32")
    assert one.target is two.target is plain.target
    assert (
        one.drafter_network is not None
        and one.drafter_network.kind == "dflash"
        and one.draft is None
    )
    assert two.drafter_network is None and two.draft is not None
    assert (one.draft_name, two.draft_name) == (str(tmp_path / "1"), str(base))
    assert one.judged is not two.judged
    options = Options(max_tokens=8, num_draft=3, cost_cache=False)
    texts = [generate(pair, "some text", options).tokens for pair in (plain, one, two)]
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(CheckpointError, match="hidden states of width 48"):
        loading.with_draft_model(plain, speculators.eagle3(tmp_path / "wrong", width=48))


def test_fewer_bits_are_taken_for_all_but_the_way_in(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = make_llama(tmp_path / "base")
    vocabulary = loading.load(base).target.vocabulary
    directory = speculators.eagle3(tmp_path / "eagle3", vocabulary=vocabulary, drafted=32)
    full = loading.load(base, directory)
    narrow = speculators.dflash(tmp_path / "dflash", vocabulary=vocabulary)
    with pytest.raises(OptionError, match="multiple of 64"):
        loading.load(base, narrow, draft_q_bits=4)
    assert full.drafter_network is not None
    options = Options(max_tokens=16, num_draft=3, cost_cache=False)
    files = read(directory)
    assert files is not None
    small = attach(files, full.target, NumberFormat(q_bits=4, q_group_size=32))
    assert not hasattr(small.fc, "bits") and hasattr(small.lm_head, "bits")
    assert small.nbytes < full.drafter_network.nbytes
    result = generate(replace(full, drafter_network=small), "some text", options)
    assert result.tokens == generate(full, "some text", replace(options, regular=True)).tokens
    assert result.stats.drafted > 0
