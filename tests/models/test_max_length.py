"""How long a sequence may be: what config.json says, scaled; a window knows no end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.engine.generate import generate
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.loading import load_model
from mlx_specdec.options import Options

from ..support import tiny
from ..support.pairs import PROMPT, pair_of

WINDOW = CacheSettings(max_size=8)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 24),
        ({"rope_type": "default", "factor": 4.0}, 24),
        ({"rope_type": "linear", "factor": 4.0}, 96),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}, 24),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 12,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            96,
        ),
    ],
)
def test_scaled_positions_reach_further(
    tmp_path: Path, scaling: dict[str, Any] | None, longest: int
) -> None:
    changes = {"rope_scaling": scaling, "max_position_embeddings": 24}
    directory = tiny.write("llama", tmp_path, **changes)
    assert load_model(directory).model.max_length == longest
    assert load_model(directory, caches=WINDOW).model.max_length is None


def test_a_window_has_no_end_and_writes_the_same_text(tmp_path: Path) -> None:
    directory = tiny.write("llama", tmp_path, max_position_embeddings=24)
    pair = pair_of(load_model(directory, caches=WINDOW).model, None)
    plain = generate(pair, PROMPT, Options(max_tokens=60, regular=True))
    drafted = generate(pair, PROMPT, Options(max_tokens=60, num_draft=3, proposer="ngram"))
    assert len(plain.tokens) == 60 and drafted.tokens == plain.tokens


def test_rotations_that_follow_the_length_keep_the_wall(tmp_path: Path) -> None:
    changes = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    directory = tiny.write("llama", tmp_path, max_position_embeddings=24, **changes)
    assert load_model(directory).model.max_length == 24
    assert load_model(directory, caches=WINDOW).model.max_length == 24
