"""generate --simulate-acceptance: the real loop, no text, marked."""

from pathlib import Path

import pytest

from ..support import tiny
from ..support.commands import Run, fails, strict
from ..support.estimates import T5, only_config

KINDS = ("drafted", "accepted")
LLAMA = {**tiny.CONFIGS["llama"], "num_hidden_layers": 3}


def pair_of(directory: Path, config: dict, depth: str) -> tuple[object, ...]:
    """Flags of two directories without weights and tokenizers."""
    big = only_config(directory / "big", config)
    small = only_config(directory / "small", {**config, depth: 1})
    return ("--model", big, "--draft-model", small)


@pytest.mark.parametrize(
    ("config", "depth"),
    [(T5, "num_decoder_layers"), pytest.param(LLAMA, "num_hidden_layers", marks=pytest.mark.slow)],
)
def test_a_pair_without_weights_decodes_at_the_requested_acceptance(
    run: Run, tmp_path: Path, config: dict, depth: str
) -> None:
    arguments = (
        "generate",
        *pair_of(tmp_path, config, depth),
        "-m",
        40,
        "--num-draft",
        3,
        "--json",
    )
    rates = []
    for share in (0, 0.6, 1):
        done = run(*arguments, "--simulate-acceptance", share)
        assert (done.code, done.err) == (0, "")
        found = strict(done.out)
        assert found["simulated_acceptance"] == share
        assert found["text"] is None and found["tokens"] is None
        assert found["lossy"] and found["rule"] == "simulated"
        assert found["generated_tokens"] == 40 and found["finish_reason"] == "length"
        reached, passed = (found["stats"][f"{name}_by_position"] for name in KINDS)
        rates.append(passed[0] / reached[0])
    assert rates[0] == 0 and rates[2] == 1 and 0 < rates[1] < 1


def test_the_same_seed_accepts_the_same_tokens(run: Run, tmp_path: Path) -> None:
    pair = pair_of(tmp_path, LLAMA, "num_hidden_layers")
    arguments = ("generate", *pair, "-m", 40, "--num-draft", 3, "--simulate-acceptance", 0.5)
    arguments = (*arguments, "--json", "--seed")
    counts = [
        strict(run(*arguments, seed).out)["stats"]["accepted_by_position"] for seed in (1, 1, 2)
    ]
    assert counts[0] == counts[1] != counts[2]


def test_without_simulation_weights_are_needed_and_nothing_is_marked(
    run: Run, t5: Path, tmp_path: Path
) -> None:
    bare = only_config(tmp_path / "bare", T5)
    done = run("generate", "hello", "--model", bare, "--regular-decode")
    assert done.code == 2 and "no weights to read" in done.err
    real = strict(run("generate", "Les pates", "--model", t5, "-m", 3, "--json").out)
    assert "simulated_acceptance" not in real and isinstance(real["text"], str)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate-acceptance", "1.5"), "must lie in [0, 1]"),
        (("--simulate-acceptance", "0.5", "--rule", "token", "--temp", "1"), "leave out --rule"),
        (("--simulate-acceptance", "0.5", "--delta", "0.1"), "leave out --rule"),
        (("--simulate-acceptance", "0.5", "--kv-bits", "8"), "leave kv-bits"),
    ],
)
def test_what_does_not_go_together_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    bare = only_config(tmp_path / "bare", LLAMA)
    fails(run("generate", "x", "--model", bare, "--draft-model", bare, *arguments), words)


def test_peers_do_not_simulate(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n", encoding="utf-8")
    bare = only_config(tmp_path / "bare", LLAMA)
    fails(run("bench", file, "--model", bare, "--peers", "--simulate-acceptance", 0.5), "leave out")
