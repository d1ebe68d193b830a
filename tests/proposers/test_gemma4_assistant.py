"""Gemma 4's assistants never change the text, and are refused where they do not fit."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.base import Base
from mlx_specdec.models.drafters.kinds import attach, read
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter

from ..support import tiny
from ..support.rows import row_of
from ..support.speculators import write

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gemma4_assistant"
DENSE = FIXTURES / "dense" / "assistant"
SIZE = 40
PROMPT = [5, 9, 12, 7, 33, 21, 14, 2, 30, 11, 17]


def test_the_text_part_of_a_model_that_sees_and_hears_will_do(tmp_path: Path) -> None:
    text = load_model(FIXTURES / "dense" / "target", dtype="float32").model
    config = json.loads((FIXTURES / "dense" / "target" / "config.json").read_text())
    tensors = mx.load(str(FIXTURES / "dense" / "target" / "model.safetensors"))
    inner = {name.replace("model.", "model.language_model.", 1): tensors[name] for name in tensors}
    wrapped = write(
        tmp_path / "wrapped",
        {"model_type": "gemma4", "text_config": config, "vocab_size": SIZE},
        inner,
    )
    files = read(DENSE)
    assert files is not None
    files.check_config(json.loads((wrapped / "config.json").read_text()))
    drafted = []
    for target in (text, load_model(wrapped, dtype="float32").model):
        network = attach(files, target, NumberFormat())
        proposer, row = (
            HiddenStateDrafter(network),
            row_of(PROMPT, SIZE, seen=PROMPT[:-1], processed=10),
        )
        shown = target.open_batch([PROMPT]).advance(mx.array([PROMPT[:-1]]), hidden=proposer.hidden)
        proposer.observe([row], shown)
        drafted.append(proposer.propose([row], [4], SilentNoise()).tokens.tolist())
    assert drafted[0] == drafted[1]


def changed(directory: Path, inner: dict | None = None, **changes: object) -> Path:
    """A copy of the assistant with other entries in its config.json."""
    shutil.copytree(DENSE, directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= inner or {}
    file.write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("inner", "changes", "match"),
    [
        ({"hidden_size": 48}, {}, "has shape .* where config.json asks for"),
        ({"enable_moe_block": True}, {}, "0 or false in an assistant"),
        ({}, {"text_config": None}, "has no hidden_size"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    inner: dict, changes: dict, match: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=match):
        read(changed(tmp_path / "drafter", inner, **changes))


def llama(**changes: int) -> Base:
    sizes = {"hidden_size": 24, "vocab_size": 40, **changes}
    return DecoderOnlyModel(tiny.from_config({**tiny.CONFIGS["llama"], **sizes}))


def test_another_target_is_refused() -> None:
    files = read(DENSE)
    assert files is not None
    for facts, match in (
        ({"hidden_size": 25}, "hidden states of width 24, and this one has 25"),
        ({"vocab_size": 99}, "vocabulary of 40, and this one has 99"),
    ):
        config = {"model_type": "gemma4_text", "hidden_size": 24, "vocab_size": 40, **facts}
        with pytest.raises(CheckpointError, match=match):
            files.check_config(config)
    files.check_config({"model_type": "gemma4", "text_config": {"hidden_size": 24}})
    with pytest.raises(CheckpointError, match=r"has no \w+_attention for"):
        attach(files, llama(), NumberFormat())
