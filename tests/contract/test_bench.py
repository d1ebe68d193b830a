"""`bench` prints a table and an object for programs, and draws a plot if matplotlib is there."""

import json
import sys
from pathlib import Path

import pytest

from .support import checkpoint, command, moved


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    place = tmp_path_factory.mktemp("bench")
    target = checkpoint(place / "target")
    draft = moved(target, place / "draft")
    prompts = place / "prompts.txt"
    prompts.write_text("one\ntwo\n", encoding="utf-8")
    models = ("--model", target, "--draft-model", draft, "--num-draft", "1,2", "--no-cache")
    return ("bench", prompts, *models, "--repeats", 2, "-m", 6)


def test_a_table_has_the_spread_of_the_repeats(words: tuple[object, ...]) -> None:
    done = command(*words, "--json")
    assert done.code == 0
    plain, *drafted = json.loads(done.out)["methods"]
    assert plain["speed_up"] == pytest.approx(1.0)
    for method in drafted:
        low, high = method["spread"]
        assert 0 < low <= high and method["differences"] == []
    assert "spread" in done.err and "draft 2" in done.err


def test_a_plot_without_matplotlib_names_the_extra(
    words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "speed.svg"
    command(*words, "--plot", file).refuses("--plot needs matplotlib", "mlx-specdec[plot]")
    assert not file.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--plot", "speed.html"), "ends with .png or .svg"),
        (("--plot", "/nowhere/speed.png"), "there is no directory /nowhere"),
        (
            ("--plot", "speed.png", "--batch-size", 2, "--num-draft", 2),
            "leave it out, or --batch-size",
        ),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused_at_once(
    words: tuple[object, ...], flags: tuple[object, ...], says: str
) -> None:
    command(*words, *flags).refuses(says)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(words: tuple[object, ...], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"speed.{suffix}"
    done = command(*words, "--plot", file)
    assert done.code == 0 and f"plot: {file}" in done.err
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")
