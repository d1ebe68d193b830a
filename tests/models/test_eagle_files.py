"""Files of EAGLE-1, EAGLE-2, HASS and P-EAGLE: how they are recognized, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.drafters.eagle import PEagleFiles
from mlx_specdec.models.drafters.kinds import check_is_none, kind_of, read

from ..support.speculators import VOCABULARY, WIDTH, eagle, eagle3, peagle, write
from ..support.tokenizers import byte_level


def as_speculators(directory: Path, tokens: int = 6) -> Path:
    """A P-EAGLE as `speculators` writes it."""
    peagle(directory)
    config = json.loads((directory / "config.json").read_text())
    top = {
        "speculators_model_type": "peagle",
        "transformer_layer_config": config,
        **{key: config[key] for key in ("draft_vocab_size", "mask_token_id")},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]},
    }
    tensors = mx.load(str(directory / "model.safetensors"))
    named = {name.replace("midlayer.", "layers.0."): array for name, array in tensors.items()}
    return write(directory, top, named)


def parallel(directory: Path) -> PEagleFiles:
    files = read(directory)
    assert isinstance(files, PEagleFiles)
    return files


def test_kinds_are_reported_by_their_tensors(tmp_path: Path) -> None:
    assert kind_of(eagle(tmp_path / "1")) == "eagle"
    prefixed = eagle(tmp_path / "2")
    tensors = mx.load(str(prefixed / "model.safetensors"))
    config = json.loads((prefixed / "config.json").read_text())
    write(prefixed, config, {f"model.{name}": array for name, array in tensors.items()})
    assert kind_of(prefixed) == "eagle"
    assert kind_of(peagle(tmp_path / "3")) == "peagle"
    assert kind_of(as_speculators(tmp_path / "4")) == "peagle"
    assert kind_of(eagle3(tmp_path / "5")) == "eagle3"
    with pytest.raises(CheckpointError, match="a drafter of the kind peagle and no whole model"):
        check_is_none(tmp_path / "3")


def test_a_p_eagle_beside_a_tokenizer_is_reported_by_the_token_that_it_masks(
    tmp_path: Path,
) -> None:
    directory = peagle(tmp_path / "peagle", drafted=None)
    byte_level(directory)
    assert kind_of(directory) == "peagle"
    assert parallel(directory).mask_token == 3


def test_an_eagle_reads_what_the_head_is_given_and_nothing_else(tmp_path: Path) -> None:
    unused = {"lm_head.weight": (VOCABULARY, WIDTH), "layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    files = read(eagle(tmp_path / "1", extra=unused))
    assert files is not None
    assert files.tapped_of(0) == files.tapped_of(32) == ()
    assert not {"embed_tokens.weight", *unused} & files.tensors.keys()


def test_the_token_of_a_place_to_be_filled_has_three_names(tmp_path: Path) -> None:
    for number, name in enumerate(("mask_token_id", "pard_token", "ptd_token_id")):
        named = {"mask_token_id": None, name: 7}
        assert parallel(peagle(tmp_path / str(number), **named)).mask_token == 7


def test_as_many_tokens_are_drafted_as_were_trained(tmp_path: Path) -> None:
    assert parallel(peagle(tmp_path / "1")).depths == 8
    assert parallel(as_speculators(tmp_path / "2", tokens=5)).depths == 5


@pytest.mark.parametrize(
    ("make", "changes", "match"),
    [
        (eagle, {"hidden_size": 48}, "has shape .* where config.json asks for"),
        (eagle, {"num_hidden_layers": 2}, "layers.1.input_layernorm.weight is missing"),
        (eagle, {"num_hidden_layers": 10**9}, "1000000000 for num_hidden_layers"),
        (eagle, {"extra": {"norm.weight": (WIDTH,)}}, "norm.weight is not part"),
        (peagle, {"mask_token_id": None}, "has no mask_token_id"),
        (peagle, {"mask_token_id": 64}, "one of the target's 64 tokens"),
        (peagle, {"tensors": {"mask_hidden": mx.zeros((2, 3 * WIDTH))}}, "mask_hidden has shape"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    make, changes: dict, match: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(make(tmp_path / "drafter", **changes))
