"""Drafters on hidden states: named as drafts, refused if they do not fit, shown by `inspect`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ..support import medusa_files, mtp, speculators
from ..support.speculators import dflash, eagle3, speculators_eagle3
from ..support.tokenizers import byte_level
from .support import Outcome, checkpoint, command

Make = Callable[..., Path]
TEXT = "some words"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def vocabulary(target: Path) -> int:
    return int(json.loads((target / "config.json").read_text())["vocab_size"])


def generate(*arguments: object) -> Outcome:
    return command("generate", TEXT, *arguments, "--no-cost-cache")


def answer(*arguments: object) -> Any:
    done = generate(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


SAMPLED = ("-m", 12, "--temp", 1)


@pytest.fixture(scope="module")
def plain(target: Path) -> Any:
    return answer("--model", target, *SAMPLED, "--regular-decode")


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("eagle3", eagle3),
        ("eagle3", speculators_eagle3),
        ("dflash", dflash),
        ("dflash2", lambda directory, **settings: dflash(directory, second=True, **settings)),
        ("dspark", lambda directory, **settings: dflash(directory, markov="vanilla", **settings)),
        ("mtp", speculators.mtp),
    ],
)
def test_a_drafter_is_named_as_a_draft_and_the_completion_stays(
    kind: str, make: Make, target: Path, vocabulary: int, plain: Any, tmp_path: Path
) -> None:
    drafter = make(tmp_path / "drafter", vocabulary=vocabulary)
    for flags in (("--num-draft", 3), ("--proposer", kind)):
        result = answer("--model", target, *SAMPLED, "--draft-model", drafter, *flags)
        assert result["tokens"] == plain["tokens"] and result["text"] == plain["text"]
        assert (result["proposer"], result["draft_model"]) == (kind, str(drafter))


def test_a_target_drafts_with_the_layers_of_its_own_checkpoint(tmp_path: Path) -> None:
    targets = [tmp_path / name for name in ("with", "without")]
    for layer, directory in zip((True, False), targets, strict=True):
        byte_level(mtp.write("glm4_moe", directory, vocabulary=400, layer=layer))
    drafting = ("-m", 6, "--num-draft", 3, "--proposer", "mtp")
    result = answer("--model", targets[0], *drafting)
    assert (result["proposer"], result["draft_model"]) == ("mtp", None)
    assert result["text"] == answer("--model", targets[0], "-m", 6, "--regular-decode")["text"]
    generate("--model", targets[1], *drafting).refuses(
        "the checkpoint carries no layers for multi-token prediction, which mlx-lm's"
    )


@pytest.mark.parametrize(
    ("make", "settings", "part"),
    [
        (eagle3, {"width": 48}, "hidden states of width 48, and this one has 32"),
        (dflash, {"width": 48}, "hidden states of width 48, and this one has 32"),
        (eagle3, {"vocabulary": 50, "drafted": 20}, "a vocabulary of 50, and this one has"),
        (eagle3, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads what layer 8"),
        (dflash, {"nested": {"target_layer_ids": [0, 7]}}, "reads what layer 7"),
        (eagle3, {"tensors": {"d2t": mx.full((32,), 10**6, mx.int64)}}, "a d2t that leads to"),
        (dflash, {"extra": {"more.weight": (2, 2)}}, "more.weight is not part"),
        (eagle3, {"encoder": 32}, "an encoder of width 32, and this one is decoder-on"),
        (eagle3, {"target_hidden_size": 31}, "embed_tokens.weight is missing"),
        (eagle3, {"hidden_size": 64}, "where config.json asks for"),
        (eagle3, {"num_hidden_layers": 2}, "layers.1.input_layernorm.weight is missing"),
        (eagle3, {"draft_vocab_size": 31}, "can be built (ValueError"),
        (eagle3, {"hidden_act": "gelu"}, "'gelu' for hidden_act"),
        (eagle3, {"eagle_aux_hidden_state_layer_ids": 1}, "can be built (TypeError"),
        (eagle3, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (eagle3, {"rope_scaling": {"rope_type": "yarn"}}, "KeyError: 'factor'"),
        (eagle3, {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' for rope"),
        (speculators.eagle, {"extra": {"norm.weight": (32,)}}, "norm.weight is not part"),
        (speculators.peagle, {"mask_token_id": None}, "has no mask_token_id"),
        (speculators.peagle, {"mask_token_id": 10**6}, "one of the target's"),
        (speculators.peagle, {"tensors": {"mask_hidden": mx.zeros((2, 96))}}, "mask_hidden has sh"),
        (dflash, {"layer_types": ["full_attention"]}, "layer_types"),
        (dflash, {"layer_types": ["sliding_attention"] * 2}, "has no sliding_window"),
        (dflash, {"block_size": 1}, "1 for block_size"),
        (dflash, {"nested": {"mask_token_id": 10**6}}, "one of the target's"),
        (dflash, {"model_type": "gemma4"}, "'gemma4' for model_type"),
        (dflash, {"second": True, "nested": {"selector_rank": 9}}, "config.json asks for"),
        (dflash, {"markov": "bigram"}, "'bigram' for markov_head_type"),
        (dflash, {"nested": {"markov_rank": 8}}, "markov_head.markov_w1.weight is missing"),
    ],
)
def test_what_cannot_fit_is_refused_before_the_weights_of_the_target_are_read(
    make: Make, settings: dict[str, Any], part: str, target: Path, vocabulary: int, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(target, tmp_path / "target"))
    (broken / "model.safetensors").write_bytes(b"no weights at all")
    drafter = make(tmp_path / "drafter", **{"vocabulary": vocabulary, **settings})
    generate("--model", broken, "--draft-model", drafter).refuses(part)


@pytest.mark.parametrize(
    ("config", "tensors", "part"),
    [
        ({"model_type": "mlp_speculator"}, "", "an MLPSpeculator"),
        ({"model_type": "llama"}, "speculator.emb.0.weight", "an MLPSpeculator"),
        ({"medusa_num_heads": 3}, "", "Medusa heads, which are given as the model"),
        ({"hydra_num_heads": 3}, "", "Hydra heads"),
        ({"dflash_config": {"projector_type": "domino"}}, "", "a Domino"),
        ({"exit_dim": 8, "num_draft_layers": 2}, "", "a ReDrafter"),
        ({"speculators_model_type": "eagle"}, "", "a drafter that says it is 'eagle'"),
        ({"model_type": "exaone_moe"}, "mtp.fc.weight", "prediction of another family"),
    ],
)
def test_drafters_that_are_known_and_not_supported_are_named(
    config: dict[str, Any], tensors: str, part: str, target: Path, tmp_path: Path
) -> None:
    speculators.write(tmp_path / "drafter", config, {tensors or "some.weight": mx.zeros((4, 4))})
    generate("--model", target, "--draft-model", tmp_path / "drafter").refuses(
        part, "not supported: ", "eagle3, "
    )


@pytest.mark.parametrize(
    ("changes", "tensor", "part"),
    [
        ({"vocabulary": 50}, {}, "a vocabulary of 50, and"),
        ({"medusa_num_heads": 4}, {}, "3.0.linear.bias is missing"),
        ({"medusa_num_layers": 10**9}, {}, "medusa_num_layers"),
        ({"base_model_name_or_path": None}, {}, "no base_model_name_or_path"),
        ({"base_model_name_or_path": "../no-base"}, {}, "names a base model that is missing: "),
        ({"base_model_name_or_path": "."}, {}, "Medusa heads too"),
        ({}, {"fc.weight": (32, 32)}, "fc.weight is not part of the model"),
        ({}, {"0.0.linear.weight": (32, 31)}, "0.0.linear.weight has shape (32, 31)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    changes: dict[str, Any],
    tensor: dict[str, tuple[int, int]],
    part: str,
    target: Path,
    tmp_path: Path,
) -> None:
    heads = medusa_files.write(tmp_path / "heads", str(target), **changes)
    file = str(heads / "medusa_lm_head.safetensors")
    arrays = {name: mx.zeros(shape) for name, shape in tensor.items()}
    if arrays:
        mx.save_safetensors(file, {**medusa_files.tensors(3, 1, 32, None), **arrays})
    generate("--model", heads).refuses(part)


def shown(path: Path) -> Any:
    done = command("inspect", path, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_inspect_knows_drafters(tmp_path: Path) -> None:
    for kind, make in (("eagle3", speculators_eagle3), ("dflash", dflash)):
        found = shown(make(tmp_path / kind))
        assert found["model_type"] == kind and found["sizes"]["hidden_size"] == 32
        drafter = found["drafter"]
        assert (drafter["kind"], drafter["target_hidden_size"]) == (kind, 32)
        assert drafter["target_layers"] == ([0, 1, 1] if kind == "eagle3" else [0, 1])
        assert found["bytes"] > 0 and found["problem"] is None
    words = " ".join(command("inspect", eagle3(tmp_path / "encoder", encoder=32)).out.split())
    assert "a target of width 32, 32 of 64 tokens; reads the outputs of its layers 0, 1, 1" in words
    assert "and its encoder's, of width 32" in words
    words = " ".join(command("inspect", speculators.eagle(tmp_path / "eagle")).out.split())
    assert "tokens; reads the input of its head" in words
    other = {"hydra_num_heads": 4, "model_type": "hydra"}
    speculators.write(tmp_path / "other", other, {"some.weight": mx.zeros((2, 2))})
    assert "some.weight" in command("inspect", tmp_path / "other").out
