"""Drafters' directories: which kind one is, and what its files say."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.drafters.files import DrafterFiles
from mlx_specdec.models.drafters.kinds import check_is_none, kind_named, kind_of, read

from ..support import speculators
from ..support.speculators import (
    VOCABULARY,
    WIDTH,
    dflash,
    eagle,
    eagle3,
    peagle,
    speculators_eagle3,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "drafters"


def files_of(directory: Path) -> DrafterFiles:
    files = read(directory)
    assert files is not None
    return files


def network_of(directory: Path) -> Any:
    """Return the drafter's network, which is not bound to a target."""
    files = files_of(directory)
    return kind_named(files.kind)(files)


def speculators_peagle(directory: Path, tokens: int = 6) -> Path:
    """A P-EAGLE as `speculators` writes it."""
    config = json.loads((peagle(directory) / "config.json").read_text())
    top = {
        "speculators_model_type": "peagle",
        "transformer_layer_config": config,
        **{key: config[key] for key in ("draft_vocab_size", "mask_token_id")},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]},
    }
    tensors = mx.load(str(directory / "model.safetensors"))
    named = {name.replace("midlayer.", "layers.0."): array for name, array in tensors.items()}
    return speculators.write(directory, top, named)


def changed(directory: Path, *, drop: str | None = None, **changes: object) -> Path:
    """The directory with entries of its config.json changed, and one dropped."""
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    config.pop(drop or "", None)
    file.write_text(json.dumps(config), encoding="utf-8")
    return directory


def prefixed(directory: Path) -> Path:
    """The directory with a prefix before the tensors' names."""
    tensors = mx.load(str(directory / "model.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    return speculators.write(directory, config, {f"model.{n}": a for n, a in tensors.items()})


def test_kinds_are_reported_by_their_files(tmp_path: Path) -> None:
    for name, kind, directory in (
        ("authors", "eagle3", eagle3(tmp_path / "1")),
        # A configuration that says nothing: the tensors do.
        ("tensors", "eagle3", eagle3(tmp_path / "2", architectures=["LlamaForCausalLM"])),
        ("speculators", "eagle3", speculators_eagle3(tmp_path / "3")),
        ("DFlash", "dflash", dflash(tmp_path / "4")),
        ("DFlash by its part", "dflash", dflash(tmp_path / "5", architectures=["Qwen3Model"])),
        ("DFlash 2", "dflash2", dflash(tmp_path / "9", second=True)),
        ("DSpark", "dspark", dflash(tmp_path / "6", markov="vanilla")),
        (
            "DSpark by its rank",
            "dspark",
            dflash(tmp_path / "7", markov="vanilla", architectures=["DFlashDraftModel"]),
        ),
        ("DeepSpec's", "dspark", dflash(tmp_path / "8", architectures=["Qwen3DSparkModel"])),
        ("a layer of speculators", "mtp", speculators.mtp(tmp_path / "10")),
        ("a layer of its maker's", "mtp", FIXTURES / "mtp-qwen3-next-original"),
        ("a layer with a number", "mtp", FIXTURES / "mtp-deepseek-v3"),
        ("EAGLE-1", "eagle", eagle(tmp_path / "11")),
        ("EAGLE-1 with a prefix", "eagle", prefixed(eagle(tmp_path / "12"))),
        ("P-EAGLE", "peagle", peagle(tmp_path / "13")),
        ("P-EAGLE by its mask token", "peagle", peagle(tmp_path / "14", drafted=None)),
        ("a P-EAGLE of speculators", "peagle", speculators_peagle(tmp_path / "15")),
    ):
        assert kind_of(directory) == kind, name
    with pytest.raises(CheckpointError, match="a drafter of the kind peagle and no whole model"):
        check_is_none(tmp_path / "13")


def test_an_eagle_reads_the_inputs_of_the_head_alone(tmp_path: Path) -> None:
    unused = {"lm_head.weight": (VOCABULARY, WIDTH), "layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    files = files_of(eagle(tmp_path / "1", extra=unused))
    assert files.hidden_layers_of(0) == files.hidden_layers_of(32) == ()
    assert not {"embed_tokens.weight", *unused} & files.tensors.keys()


def test_a_p_eagle_names_its_mask_token_and_its_depth(tmp_path: Path) -> None:
    for number, name in enumerate(("mask_token_id", "pard_token", "ptd_token_id")):
        named = {"mask_token_id": None, name: 7}
        assert network_of(peagle(tmp_path / str(number), **named)).mask_token == 7
    assert network_of(speculators_peagle(tmp_path / "4", tokens=5)).most == 5


def test_the_key_decides_how_layers_are_counted(tmp_path: Path) -> None:
    one = eagle3(tmp_path / "1", eagle_aux_hidden_state_layer_ids=[2, 5, 9])
    assert files_of(one).hidden_layers == (1, 4, 8), "named by their inputs"
    inside = {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}
    by_output = changed(
        eagle3(tmp_path / "2", eagle_config=inside), drop="eagle_aux_hidden_state_layer_ids"
    )
    assert files_of(by_output).hidden_layers == (2, 5, 9), "named by their outputs"
    ids = [1, 9, 17, 25, 33]
    deepspec = changed(
        eagle3(
            tmp_path / "5", hidden_count=5, architectures=["Qwen3Eagle3Model"], target_layer_ids=ids
        ),
        drop="eagle_aux_hidden_state_layer_ids",
    )
    assert files_of(deepspec).hidden_layers_of(36) == (1, 9, 17, 25, 33), "named by their outputs"
    assert files_of(dflash(tmp_path / "3")).hidden_layers == (0, 1), "named by their outputs"
    of_speculators = dflash(tmp_path / "4", aux_hidden_state_layer_ids=[1, 2])
    assert files_of(of_speculators).hidden_layers == (0, 1), "named by their inputs"


def test_layers_that_nothing_names_are_the_usual_ones(tmp_path: Path) -> None:
    nameless = changed(eagle3(tmp_path / "1"), drop="eagle_aux_hidden_state_layer_ids")
    # The inputs of layers 2, 16 and 29.
    assert files_of(nameless).hidden_layers_of(32) == (1, 15, 28)
    inside = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}
    for changes in ({"eagle_config": inside}, {"eagle_aux_hidden_state_layer_ids": []}):
        empty = changed(nameless, **changes)
        assert files_of(empty).hidden_layers_of(32) == (1, 15, 28)
    config = {"mask_token_id": 3}
    nameless = changed(dflash(tmp_path / "2", hidden_count=3), dflash_config=config)
    assert files_of(nameless).hidden_layers_of(36) == (1, 17, 33)


def test_block_size_counts_slots_or_proposals(tmp_path: Path) -> None:
    for directory, most in (
        (dflash(tmp_path / "1", block_size=5), 4),
        (dflash(tmp_path / "2", block_size=5, markov="vanilla"), 5),
        (dflash(tmp_path / "3", block_size=5, sample_from_anchor=True), 5),
        (dflash(tmp_path / "4", block_size=5, markov="gated", sample_from_anchor=False), 4),
        (dflash(tmp_path / "5", nested={"block_size": 7}), 6),
    ):
        assert network_of(directory).most == most
