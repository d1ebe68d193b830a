"""`models`: what is on the disk, and the removal of one model after a question."""

import io
from pathlib import Path

import pytest

from mlx_specdec.cli import loading

from ..checkpoints.test_stored_models import cache as cache
from ..checkpoints.test_stored_models import put
from ..support.commands import Run, fails
from ..support.shipped import ROOT


def test_models_are_listed_with_their_sizes(run: Run, cache: Path) -> None:
    done = run("models")
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    [row] = [line for line in lines if line[:1] == ["some/model-4bit"]]
    assert row[1:4] == ["1.0", "kB", "llama"]
    assert "without weights" in next(x for x in done.out.splitlines() if " begun " in x)
    assert f"The Hub's cache {cache} has 1.0 kB of models." in done.out


def test_drafters_and_heads_are_listed_as_what_they_are(run: Run, cache: Path) -> None:
    for name in ("dspark", "medusa"):
        shipped = ROOT / "weights" / f"py-llama-{name}"
        put(cache, f"some/{name}", {file.name: file.read_bytes() for file in shipped.iterdir()})
    rows = [line.split() for line in run("models").out.splitlines()]
    types = {row[0]: row[3:5] for row in rows if row and row[0].startswith("some/")}
    assert types["some/dspark"] == ["dspark", "drafter"]
    assert types["some/medusa"] == ["Medusa", "heads"]


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("\n", False), ("", False)])
def test_a_model_is_removed_after_a_question(
    run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str, removed: bool
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    done = run("models", "remove", "some/model-4bit")
    assert done.code == 0
    assert done.out == "Remove some/model-4bit (1.0 kB) from the disk? [y/N] "
    assert done.err.startswith("removed some/model-4bit" if removed else "nothing was removed")
    assert ("some/model-4bit" in run("models").out) != removed


def test_what_cannot_be_removed_is_refused_in_a_line(run: Run, cache: Path) -> None:
    fails(run("models", "remove", "other/model"), "the Hub's cache has no other/model")
    fails(run("models", "remove", "weights/mine"), "came with the program", "yourself")
    fails(run("models", "remove"), "name the model to remove")
    fails(run("models", "list", "some/model-4bit"), "models remove NAME removes one")


def test_names_of_models_are_completed(cache: Path) -> None:
    assert {"auto", "auto:code", "some/model-4bit", "weights/mine"} <= {*loading.targets()}
    assert {"auto", "mtp", "some/model-4bit"} <= {*loading.drafts()}
