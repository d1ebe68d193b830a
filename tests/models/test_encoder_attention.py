"""Drafters whose layers attend to what the target's encoder put out."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.base import Base
from mlx_specdec.models.drafters.kinds import attach, read
from mlx_specdec.models.drafters.network import DrafterNetwork
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter
from mlx_specdec.types import feed

from ..support import tiny
from ..support.lender import differ
from ..support.rows import row_of
from ..support.speculators import MAKERS, WIDTH, dflash, eagle3

T5 = Path(__file__).parents[1] / "fixtures" / "t5" / "own-head-scaled"
SOURCES = [[5, 9, 12, 7, 33, 21, 8], [4, 11], [30, 2, 19, 44, 6, 13, 27, 40, 3, 17, 22]]


def translator() -> Base:
    return load_model(T5, dtype="float32").model


def drafter(kind: str, directory: Path, target: Base, **settings) -> DrafterNetwork:
    made = MAKERS[kind](directory, width=target.width, encoder=target.width, **settings)
    files = read(made)
    assert files is not None
    return attach(files, target, NumberFormat("float32"))


def fresh(target: Base, place: int) -> Any:
    """A row of one of the sources. Each has written another number of tokens."""
    text = [0, 7, 3, 9, 11][: 2 + place]
    return row_of(text, target.vocabulary, Options(temperature=1.0), prompt=SOURCES[place])


def see(context: Any, proposer: HiddenStateDrafter, rows: list[Any], most: int = 9) -> None:
    """Let the target process at most so many committed tokens of each row, but not the newest."""
    for row in rows:
        row.seen = row.committed[row.processed : -1][:most]
        row.processed += len(row.seen)
    proposer.observe(rows, feed(context, [row.seen for row in rows], proposer.hidden))


@pytest.mark.parametrize("kind", MAKERS)
def test_beside_other_sources_drafts_are_what_they_are_alone(kind: str, tmp_path: Path) -> None:
    """The first two rows begin together, the third one joins, and in the end the first leaves."""
    target = translator()
    proposer = HiddenStateDrafter(drafter(kind, tmp_path / kind, target))
    rows = [fresh(target, place) for place in range(3)]
    context = target.open_batch(SOURCES[:2])
    see(context, proposer, rows[:2], 1)
    context.merge(target.open_batch(SOURCES[2:]))
    see(context, proposer, rows, 2)
    context.keep([2, 1])
    rows = [rows[2], rows[1]]
    for row in rows:
        row.committed = [*row.committed, 11]
    see(context, proposer, rows)
    made = proposer.propose(rows, [3, 3], SilentNoise())
    for place, row in enumerate(rows):
        alone = row_of(row.committed, target.vocabulary, row.options)
        see(target.open(row.prompt), proposer, [alone])
        expected, mine = proposer.propose([alone], [3], SilentNoise()), made.of(place)
        assert mx.array_equal(mine.tokens, expected.tokens)
        assert mine.rows is not None and expected.rows is not None
        assert not differ(mine.rows, expected.rows)


def test_targets_without_such_an_encoder_are_refused(tmp_path: Path) -> None:
    directory = eagle3(tmp_path / "eagle3", encoder=WIDTH)
    files = read(directory)
    assert files is not None
    decoder_only = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2}
    encoder_decoder = {"model_type": "t5", "d_model": 32, "num_layers": 2, "vocab_size": 64}
    files.check_config(encoder_decoder)
    with pytest.raises(CheckpointError, match="an encoder of width 32, and this one is decoder-on"):
        files.check_config(decoder_only)
    # A target without a config.json is checked when the drafter is attached.
    llama = DecoderOnlyModel(tiny.build("llama"))
    with pytest.raises(CheckpointError, match="an encoder of width 32, and this one is decoder-on"):
        attach(files, llama, NumberFormat())
    target = translator()
    wider = read(eagle3(tmp_path / "other", width=target.width, encoder=48))
    assert wider is not None
    for refuses in (
        lambda: wider.check_config({**encoder_decoder, "d_model": target.width}),
        lambda: attach(wider, target, NumberFormat()),
    ):
        with pytest.raises(CheckpointError, match="encoder of width 48, and this one has one of"):
            refuses()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"encoder_attention": False}, "encoder_norm.weight is not part"),
        ({"encoder": None, "encoder_attention": True}, "encoder_norm.weight is missing"),
        ({"encoder_hidden_size": 40}, r"weight encoder_norm.weight has shape \(32,\)"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    settings: dict, match: str, tmp_path: Path
) -> None:
    for make in (eagle3, dflash):
        with pytest.raises(CheckpointError, match=match):
            read(make(tmp_path / make.__name__, **{"encoder": WIDTH, **settings}))
