"""A draft with another vocabulary proposes tokens that both have."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.core.noise import IndependentNoise, SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.engine.loading import load
from mlx_specdec.errors import OptionError
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.proposers.draft_model import DraftModel
from mlx_specdec.text.vocabulary import Translation

from ..support import tiny
from ..support.models import make_t5
from ..support.rows import row_of

SHARED = [3, -1, 7, 0, -1, 9]
FED = [3, 5, 7, 0, 5, 9]


def test_rows_are_the_drafts_own_law_over_what_both_have() -> None:
    logits = mx.random.normal((1, 2, 12), key=mx.random.key(0))
    rows = np.array(Translation(SHARED, FED).rows(logits))
    expected = np.array(logits)[..., np.maximum(SHARED, 0)]
    expected[..., [1, 4]] = -np.inf
    np.testing.assert_array_equal(rows, expected)


def test_texts_are_fed_one_id_for_one() -> None:
    translation = Translation(SHARED, FED)
    assert translation.feed([5, 1, 0]) == [9, 5, 3]
    assert translation.feed([len(FED), -1]) == [0, 0]
    assert translation.feed_array(mx.array([[5, 1, 0]])).tolist() == [[9, 5, 3]]


@pytest.mark.parametrize("settings", [Options(), Options(temperature=1.3, top_k=3)])
def test_only_shared_tokens_are_proposed_and_their_rows_are_what_drew_them(
    settings: Options,
) -> None:
    model = DecoderOnlyModel(tiny.build("llama"))
    source = IndependentNoise(3, len(SHARED)) if settings.temperature else SilentNoise()
    draft = DraftModel(model, translation=Translation(SHARED, FED))
    for first in (0, 2, 3, 5):
        noise = source.at(first, first)
        proposal = draft.propose([row_of([0, 2, first], len(SHARED), settings)], [3], noise)
        tokens = proposal.tokens.tolist()[0]
        assert all(SHARED[token] >= 0 for token in tokens)
        if settings.temperature:
            drawn = [
                int(mx.argmax(proposal.rows[0, k] + noise.draft(k)[0, 0]).item()) for k in range(3)
            ]
            assert drawn == tokens


@pytest.fixture
def pair_on_disk(tmp_path: Path) -> tuple[Path, Path]:
    """The draft's tokenizer swaps two ids and lacks some of the target's words."""
    target = make_t5(tmp_path / "target", extra=("▁more", "▁words"))
    draft = make_t5(tmp_path / "draft", seed=1)
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    pieces = content["model"]["vocab"]
    pieces[300], pieces[301] = pieces[301], pieces[300]
    file.write_text(json.dumps(content), encoding="utf-8")
    return target, draft


def test_another_word_for_it_is_refused(pair_on_disk: tuple[Path, Path]) -> None:
    with pytest.raises(OptionError, match="one of same, intersect"):
        load(*pair_on_disk, draft_vocab="union")
