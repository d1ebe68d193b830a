"""Configurations and costs that estimates are tested with."""

import itertools
import json
from pathlib import Path

from mlx_specdec.measure.prediction import RoundCost

from . import tiny


def only_config(directory: Path, config: dict) -> Path:
    """A directory with nothing but config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


# name: (plain step in ms, layers, divided, drafted, V, tokens a round, draft in ms a round)
CASES = {
    "27B, heads": (68, 64, 0.95, 3, 1.30, 2.8, 6),
    "27B, block": (68, 64, 0.95, 7, 1.55, 4.6, 14),
    "27B, lookup": (68, 64, 0.95, 8, 1.6, 4.0, 0),
    "123B, draft model": (95, 88, 0.97, 4, 1.25, 3.0, 22),
    "235B experts": (51, 94, 0.93, 3, 1.8, 2.6, 5),
}


# name, machines, us an exchange: plain and speculative tokens/s and S
EXPECTED = [
    ("27B, heads", 2, 30, 25.3, 49.8, 1.97),
    ("27B, heads", 2, 70, 22.4, 45.6, 2.04),
    ("27B, heads", 2, 300, 13.5, 30.8, 2.28),
    ("27B, heads", 2, 600, 8.9, 21.7, 2.44),
    ("27B, heads", 2, 5000, 1.5, 4.0, 2.73),
    ("27B, heads", 4, 5000, 1.5, 4.2, 2.75),
    ("27B, block", 2, 70, 22.4, 58.8, 2.62),
    ("27B, block", 4, 600, 10.4, 38.0, 3.66),
    ("27B, lookup", 2, 600, 8.9, 29.9, 3.36),
    ("27B, lookup", 4, 30, 42.8, 113.9, 2.66),
    ("123B, draft model", 2, 30, 18.4, 33.9, 1.84),
    ("123B, draft model", 4, 300, 12.7, 28.0, 2.20),
    ("235B experts", 2, 70, 24.7, 38.6, 1.56),
    ("235B experts", 4, 600, 7.8, 17.9, 2.29),
]


# name, machines: us above which S is higher than on one machine, below which sharing pays at all
THRESHOLDS = [
    ("27B, heads", 2, 57, 252, 328),
    ("27B, heads", 4, 86, 379, 492),
    ("27B, block", 2, 69, 252, 391),
    ("27B, lookup", 2, 0, 252, 404),
    ("123B, draft model", 4, 189, 393, 491),
    ("235B experts", 2, 14, 126, 227),
]


def costs(name: str) -> tuple[float, int, RoundCost, list[float]]:
    """ms of a plain step, exchanges of a pass, costs on one machine, a_1 .. a_k."""
    step, layers, _, drafted, rows, tokens, draft = CASES[name]
    cost = RoundCost(draft / step / drafted, {1: 1.0, drafted + 1: rows})
    acceptance = [(tokens - 1) / drafted] * drafted
    return step, 2 * layers, cost, acceptance


def share(name: str, machines: int) -> float:
    divided = CASES[name][2]
    return divided / machines + 1 - divided


LLAMA = {**tiny.CONFIGS["llama"], "num_hidden_layers": 10}
QUICK = {"prompt_tokens": 8, "max_tokens": 8, "turns": 1, "seconds": 1000.0}


def ticking():
    """A clock that moves on by one whenever it is read."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


T5 = {
    "model_type": "t5",
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 2,
    "num_layers": 3,
    "num_decoder_layers": 5,
    "tie_word_embeddings": False,
}
