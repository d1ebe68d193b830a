"""`generate` without arguments: the sentence, both ways of decoding, and what to do next."""

import tomllib
from pathlib import Path

import pytest

from mlx_specdec import process as blas
from mlx_specdec.cli import app, loading
from mlx_specdec.cli.loading import sample
from mlx_specdec.errors import OptionError

from ..support.commands import Run
from ..support.shipped import ROOT


@pytest.fixture(autouse=True)
def tiny_pair(monkeypatch: pytest.MonkeyPatch, t5: Path, t5_draft: Path) -> None:
    """A tiny translator in the place of the shipped one."""
    monkeypatch.setattr(loading, "SHIPPED_TARGET", str(t5))
    monkeypatch.setattr(loading, "SHIPPED_DRAFT", str(t5_draft))
    monkeypatch.setattr(blas, "is_slow", lambda: False)


def test_the_demo_shows_its_sentence_and_ends_with_a_comparison(run: Run) -> None:
    done = run("generate", "-m", 20)
    lines = done.err.splitlines()
    assert done.code == 0 and lines[0] == f"prompt: {loading.SHIPPED_PROMPT}"
    speedup, _, said = lines[-1].partition(" times as fast as plain decoding (")
    turns, _, ratio = speedup.partition(": ")
    assert turns == "timed again, 3 times each"  # not the run whose statistics stand above
    assert float(ratio) > 0 and "tokens/s), the same text; next: mlx-specdec generate" in said
    assert done.out == run("generate", "-m", 20, "--regular-decode").out


def test_where_the_blas_is_slow_it_says_what_is_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "is_slow", lambda: True)
    monkeypatch.setattr(blas, "install", lambda extra: f"install {extra}")
    assert run("generate", "-m", 5).err.endswith("fast BLAS: install fast-cpu\n")


@pytest.mark.parametrize(
    "arguments", [("--json",), ("--quiet",), ("a prompt",), ("--regular-decode",), ("-m", 0)]
)
def test_nothing_is_compared_where_nothing_asks_for_it(run: Run, arguments: tuple) -> None:
    done = run("generate", *(arguments if "-m" in arguments else (*arguments, "-m", 5)))
    assert done.code == 0 and "times as fast" not in done.err


@pytest.mark.parametrize("words", [(), ("Hello",), ("Where is it?", "-m", "5"), ("genrate",)])
def test_without_a_command_it_generates(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*names: object, **rest: object) -> None:
        raise OptionError(f"loading {names[0]}")

    monkeypatch.setattr("mlx_specdec.engine.loading.load", load)
    monkeypatch.setattr("sys.argv", ["mlx-specdec", *words])
    with pytest.raises(SystemExit) as ended:
        app.main()
    says = (
        "perhaps you mean generate"
        if words == ("genrate",)
        else f"loading {loading.SHIPPED_TARGET}"
    )
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_the_wheel_brings_what_the_defaults_name() -> None:
    """What is in weights/ and prompts/ of a clone is found inside an installed package."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"mlx_specdec", "weights/t5-enfr", "weights/t5-enfr-draft"}
    needed.add(sample("weights/t5-enfr").relative_to(ROOT).as_posix())
    assert needed <= set(wheel["only-include"])
    for name in wheel["only-include"]:
        assert (ROOT / name).exists()
    assert wheel["sources"] == {name: f"mlx_specdec/{name}" for name in ("weights", "prompts")}
