"""Tiny targets with hidden-state drafters of each kind."""

from dataclasses import replace
from pathlib import Path

from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.base import Base
from mlx_specdec.models.drafters.kinds import attach, read
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.number_format import NumberFormat

from .pairs import FIXTURES, SIZE, Numbers, model_for
from .speculators import MAKERS as MAKERS

target_of = model_for


def pair_of(target: Base, directory: Path) -> Pair:
    files = read(directory)
    assert files is not None
    network = attach(files, target, NumberFormat())
    plain = Pair("target", "drafter", target, None, Numbers(), frozenset(), SIZE, "float32", 0.0)
    return replace(plain, drafter_network=network)


def made(kind: str, family: str, tmp_path: Path, **settings) -> Pair:
    target = target_of(family)
    return pair_of(target, MAKERS[kind](tmp_path / kind, width=target.width, **settings))


def gemma4(name: str) -> Pair:
    """A target of Gemma 4 and its assistant, of the fixtures."""
    directory = FIXTURES.with_name("gemma4_assistant") / name
    return pair_of(load_model(directory / "target", dtype="float32").model, directory / "assistant")
