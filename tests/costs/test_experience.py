"""What texts taught of acceptance survives the process, and a broken file harms nobody."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import process as user_cache
from mlx_specdec.draft_length import experience
from mlx_specdec.draft_length.experience import Experience, TextKey

KEY = TextKey("target", 10, "draft", 5, "float32", 0, "coupled 0")
THREE = Experience(((3.0,), (1.0,)), 0.0)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path))
    return tmp_path


def files() -> list[Path]:
    return list(user_cache.directory("experience").glob("*"))


def test_texts_add_up_and_older_ones_weigh_less() -> None:
    assert experience.read(KEY) is None
    experience.merge(KEY, Experience(((10.0, 5.0), (5.0, 1.0)), 1.0))
    experience.merge(KEY, Experience(((200.0, 100.0), (50.0, 20.0)), 0.5, 3.0))
    less = math.exp(-1)
    expected = ((200 + 10 * less, 100 + 5 * less), (50 + 5 * less, 20 + less))
    assert experience.read(KEY) == Experience(expected, 0.5, 3.0)
    assert experience.read(replace(KEY, temperature=1)) is None


def test_texts_without_drafts_forget_nothing() -> None:
    experience.merge(KEY, Experience(((10.0,), (5.0,)), 1.0))
    for _ in range(100):
        experience.merge(KEY, Experience(((0.0,), (0.0,)), 0.5))
    assert experience.read(KEY) == Experience(((10.0,), (5.0,)), 0.5)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"key": 1}',
        {"reached": [1.0], "passed": [2.0]},
        {"reached": [-1.0], "passed": [-2.0]},
        {"reached": [1.0, 2.0], "passed": [1.0]},
        {"reached": ["a"], "passed": [1.0]},
        {"reached": [float("nan")], "passed": [0.0]},
        {"reached": [1e300], "passed": [0.0]},
        {"saved": float("inf")},
        {"reading": -1.0},
        {"reading": float("nan")},
        {"key": asdict(replace(KEY, rule="token 0"))},
    ],
)
def test_what_cannot_be_read_is_as_good_as_absent(content: str | dict[str, Any]) -> None:
    experience.merge(KEY, THREE)
    [file] = files()
    if isinstance(content, dict):
        content = json.dumps({**json.loads(file.read_text()), **content})
    file.write_text(content)
    assert experience.read(KEY) is None
    experience.merge(KEY, THREE)
    assert experience.read(KEY) == THREE


def test_what_cannot_be_written_is_not(place: Path) -> None:
    user_cache.directory("experience").write_text("no directory")
    experience.merge(KEY, THREE)
    assert experience.read(KEY) is None


def test_eight_writers_at_once_leave_a_whole_file() -> None:
    def write(number: int) -> None:
        for _ in range(25):
            experience.merge(KEY, Experience(((float(number),), (1.0,)), 0.0))
            known = experience.read(KEY)
            assert known is not None and len(known.verdicts[0]) == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(1, 9)))
    assert len(files()) == 1
