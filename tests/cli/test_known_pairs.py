"""The table of pairs: shown, searched by name, and used by --draft-model auto."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_specdec.checkpoints.source import resolve
from mlx_specdec.cli import loading
from mlx_specdec.cli.pairs import draft_for, known_pairs
from mlx_specdec.errors import OptionError

from ..support.commands import Run, strict


def test_the_table_is_consistent() -> None:
    known = known_pairs()
    assert len({one.target for one in known}) == len(known)
    assert not {one.target for one in known} & {one.draft for one in known}
    for one in known:
        # A distilled draft has the encoder of its target, and other costs than weights tell.
        share = 0.7 if "distil" in one.draft else 0.4
        assert 0 < one.draft_billions < share * one.target_billions, one
        assert one.target.count("/") == one.draft.count("/") == 1, one


def test_pairs_that_we_ran_are_those_in_the_repository() -> None:
    run = [one for one in known_pairs() if one.run]
    assert len(run) == 2
    for one in run:
        assert resolve(one.target).is_dir()
        assert resolve(one.draft).is_dir()


def test_the_command_shows_them(run: Run) -> None:
    shown = run("pairs", "QWEN3-8b").out
    assert "Qwen/Qwen3-0.6B " in shown and "600 M" in shown and "not yet" in shown
    assert "t5" not in shown
    whole = strict(run("pairs", "--json").out)["pairs"]
    assert [one["target"] for one in whole] == [one.target for one in known_pairs()]
    nothing = run("pairs", "gpt-9")
    assert nothing.code == 2 and "no pair with gpt-9" in nothing.err


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        ("qwen3-8b", "Qwen/Qwen3-0.6B"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-0.6B"),
        ("./models/Qwen3-32B-MLX-bf16/", "Qwen/Qwen3-0.6B"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "meta-llama/Llama-3.2-1B-Instruct"),
        ("t5-large", "google-t5/t5-small"),
    ],
)
def test_a_target_is_known_whoever_copied_it(target: str, draft: str) -> None:
    assert draft_for(target) == draft


def test_auto_names_the_draft_that_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, draft_model: str | None, **rest: object) -> None:
        raise OptionError(f"loading {model} with {draft_model}")

    monkeypatch.setattr("mlx_specdec.engine.loading.load", load)
    arguments = ("generate", "x", "--model", "google/flan-t5-xl", "--draft-model", "auto")
    assert run(*arguments).err == "error: loading google/flan-t5-xl with google/flan-t5-small\n"
    assert "has no draft for a/b" in run("bench", "--model", "a/b", "--draft-model", "auto").err


@pytest.mark.parametrize(
    ("command", "loaded"),
    [
        (("generate",), "weights/t5-enfr with weights/t5-enfr-draft"),
        (("generate", "--draft-model", "self"), "weights/t5-enfr with self"),
        (("serve", "--port", 0), "weights/t5-enfr with weights/t5-enfr-draft"),
        (("serve", "--port", 0, "--proposer", "none"), "weights/t5-enfr with None"),
        (("chat",), "weights/t5-enfr with weights/t5-enfr-draft"),
        (("chat", "--model", "weights/py-llama"), "weights/py-llama with None"),
    ],
)
def test_without_a_name_the_shipped_models_are_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...], loaded: str
) -> None:
    def load(model: str, draft_model: str | None, **rest: object) -> None:
        raise OptionError(f"loading {model} with {draft_model}")

    monkeypatch.setattr("mlx_specdec.engine.loading.load", load)
    done = run(*command)
    assert done.code == 2 and done.err.endswith(f"error: loading {loaded}\n")


@pytest.mark.parametrize("command", ["generate", "bench", "calibrate", "estimate", "serve", "chat"])
def test_without_the_sample_models_a_pair_has_to_be_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    done = run(command)
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
    assert "--model google/flan-t5-large" in done.err and "mlx-specdec pairs" in done.err
