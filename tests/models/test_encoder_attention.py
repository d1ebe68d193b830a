"""Drafters whose layers attend to what the target's encoder put out."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.interfaces import Proposal, feed
from mlx_specdec.models.base import Base
from mlx_specdec.models.drafters.kinds import attach, read
from mlx_specdec.models.drafters.network import DrafterNetwork
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.proposers.combined import RowByRow
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter
from mlx_specdec.sampling.noise import SilentNoise
from mlx_specdec.sampling.settings import Sampling

from ..support import tiny
from ..support.lender import differ
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


def proposals(target: Base, network: DrafterNetwork, sources: list[list[int]]) -> list[Proposal]:
    """Of sequences side by side: the first two begin together, the others join them, and in the end
    the first one leaves. Each has seen another number of tokens."""
    texts = [[0, 7, 3, 9][: 2 + place] for place in range(len(sources))]

    def begun(rows: slice) -> tuple:
        context = target.open_batch(sources[rows])
        proposer = RowByRow(
            lambda: HiddenStateDrafter(network, Sampling(temperature=1.0), target.vocabulary)
        )
        proposer.begin(sources[rows])
        return context, proposer

    def see(context, proposer: RowByRow, rows: list[list[int]]) -> None:
        scores = feed(context, rows, proposer.taps)
        scores_of_rows = [scores.of(row, len(tokens)) for row, tokens in enumerate(rows)]
        proposer.observe(rows, scores_of_rows)

    context, proposer = begun(slice(0, 2))
    see(context, proposer, [text[:1] for text in texts[:2]])
    for first, second in zip((context, proposer), begun(slice(2, None)), strict=True):
        first.join(second)
    see(context, proposer, [text[1:-1] for text in texts[:2]] + [text[:-1] for text in texts[2:]])
    context.filter([2, 1])
    proposer.filter([2, 1])
    texts = [[*texts[row], 11] for row in (2, 1)]
    see(context, proposer, [text[-2:-1] for text in texts])
    made = proposer.propose(texts, 3, SilentNoise())
    return [made.of(row) for row in range(2)]


@pytest.mark.parametrize("kind", MAKERS)
def test_beside_other_sources_drafts_are_what_they_are_alone(kind: str, tmp_path: Path) -> None:
    target = translator()
    network = drafter(kind, tmp_path / kind, target)
    together = proposals(target, network, SOURCES)
    for place, made in zip((2, 1), together, strict=True):
        proposer = HiddenStateDrafter(network, Sampling(temperature=1.0), target.vocabulary)
        proposer.begin([SOURCES[place]])
        text = [*[0, 7, 3, 9][: 2 + place], 11]
        scores = target.open(SOURCES[place]).advance(mx.array([text[:-1]]), taps=proposer.taps)
        proposer.observe([text[:-1]], [scores])
        alone = proposer.propose([text], 3, SilentNoise())
        assert mx.array_equal(made.tokens, alone.tokens)
        assert made.rows is not None and alone.rows is not None
        assert not differ(made.rows, alone.rows)


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
