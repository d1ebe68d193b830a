"""A tiny translator and a tiny completer on disk, and a way to run the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_specdec.cli.app import (
    batch,
    bench,
    calibrate,
    chat,
    convert,
    estimate,
    generate,
    inspect,
    pairs,
    run_one,
    serve,
    train_draft,
    train_medusa,
)
from mlx_specdec.models.t5.config import T5Config
from mlx_specdec.models.t5.network import T5
from mlx_specdec.text.tokenizer import load_tokenizer

from .. import tiny
from ..text.makers import byte_level, unigram

COMMANDS = {
    "batch": batch,
    "bench": bench,
    "calibrate": calibrate,
    "chat": chat,
    "convert": convert,
    "estimate": estimate,
    "generate": generate,
    "inspect": inspect,
    "pairs": pairs,
    "serve": serve,
    "train-draft": train_draft,
    "train-medusa": train_medusa,
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


def strict(text: str | bytes) -> Any:
    """What JSON says, NaN and Infinity being none."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command as the program would, with the given arguments."""

    def run_command(command: str, *arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_one(COMMANDS[command])
        out, err = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return run_command


def make_t5(directory: Path, seed: int = 0, extra: tuple[str, ...] = ()) -> Path:
    """A random T5 with a real tokenizer."""
    size = load_tokenizer(unigram(directory, extra=extra), kind="encoder-decoder").size
    config = {
        "model_type": "t5",
        "vocab_size": size,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_heads": 2,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    network = T5(T5Config.from_dict(config, own_head=True))
    keys = iter(mx.random.split(mx.random.key(seed), 200))

    def draw(array: mx.array) -> mx.array:
        return mx.random.normal(array.shape, key=next(keys)) * array.shape[-1] ** -0.5

    weights = {name: draw(array) for name, array in tree_flatten(network.parameters())}
    # Without this an untrained model may end a text at once.
    weights["lm_head.weight"][1] = 0
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_llama(directory: Path, seed: int = 0, padding: int = 0, **settings: object) -> Path:
    """A random Llama with a real tokenizer. padding: columns of its logits that are no tokens."""
    size = load_tokenizer(byte_level(directory, **settings), kind="decoder-only").size
    tiny.write("llama", directory, seed, vocab_size=size + padding)
    return directory


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="session")
def t5_draft(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The T5 itself, its weights moved a little."""
    directory = tmp_path_factory.mktemp("t5-draft")
    for file in t5.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = dict(mx.load(str(t5 / "model.safetensors")))
    moved = tree_map(lambda array: array * (1 + 0.02 * mx.sin(100 * array)), weights)
    mx.save_safetensors(str(directory / "model.safetensors"), moved)
    return directory


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where the batch command writes, with nothing beside it."""
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "out.jsonl"


Run = Callable[..., Outcome]
