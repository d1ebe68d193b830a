"""Which layers a drafter should read: the best of three numberings, or none."""

import functools
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import probe as probing
from benchmarks.probe import SETTINGS, Numbering, Probe
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import encode
from mlx_specdec.text.tokenizer import load_tokenizer
from mlx_specdec.types import after

from ..support import tiny
from ..support.speculators import WIDTH, eagle3
from ..support.tokenizers import byte_level

LAYERS = 5
PROMPTS = ["some words", "other words"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with layers enough to mix them up."""
    directory = tmp_path_factory.mktemp("target")
    size = load_tokenizer(byte_level(directory), kind="decoder-only").size
    return tiny.write("llama", directory, vocab_size=size, num_hidden_layers=LAYERS)


@functools.cache
def written(target: Path) -> tuple[Pair, list[tuple[list[int], list[int]]]]:
    """The prompts' tokens, and with them those that the target writes."""
    pair = load(target)
    prefixes = [list(encode(pair, prompt, SETTINGS)) for prompt in PROMPTS]
    return pair, [
        (prefix, [*prefix, *generate(pair, prefix, SETTINGS).tokens]) for prefix in prefixes
    ]


def drafter(directory: Path, target: Path, layer: int, named: int) -> Path:
    """An EAGLE-3 that knows the target's texts by heart from what `layer` puts out, and whose files
    name another one."""
    pair, texts = written(target)
    states, tokens = [], []
    for prefix, text in texts:
        seen = pair.target.open_batch([text[:1]]).advance(mx.array([text]), hidden=[after(layer)])
        # The state of a token, with the token after it, tells the next but one.
        rows = np.array(seen.hidden[after(layer)][0])[len(prefix) - 1 : -2]
        states.append(rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True)))
        tokens += text[len(prefix) + 1 :]
    size = pair.vocabulary
    head = np.linalg.lstsq(np.concatenate(states), np.eye(size)[tokens], rcond=None)[0].T
    inner = {
        "fc.weight": mx.eye(WIDTH),
        "norm.weight": mx.ones(WIDTH),
        "midlayer.self_attn.o_proj.weight": mx.zeros((WIDTH, WIDTH)),
        "midlayer.mlp.down_proj.weight": mx.zeros((WIDTH, 48)),
        "lm_head.weight": mx.array(head.astype(np.float32)),
        "d2t": mx.zeros((size,), dtype=mx.int64),
    }
    ids = [named + 1]
    return eagle3(
        directory,
        drafted=size,
        hidden=1,
        vocabulary=size,
        tensors=inner,
        eagle_aux_hidden_state_layer_ids=ids,
    )


def numbering(shift: int, rounds: int, first: int) -> Numbering:
    return Numbering(shift, (4 + shift, 8 + shift), rounds, first, 4 * rounds, first)


@pytest.mark.parametrize(
    ("firsts", "best", "part"),
    [
        ((60, 40, 41), 0, "leave them as they are"),
        ((40, 41, 60), 1, "one higher serve better"),
        ((2, 60, 3), -1, "one lower serve better"),
        ((50, 55, 40), 0, "leave them as they are"),
        ((1, 2, 0), None, "made for another target, or"),
        ((0, 0, 0), None, "made for another target, or"),
    ],
)
def test_another_numbering_has_to_be_clearly_better(
    firsts: tuple[int, int, int], best: int | None, part: str
) -> None:
    rows = zip((0, -1, 1), firsts, strict=True)
    numberings = tuple(numbering(shift, 100, first) for shift, first in rows)
    measured = Probe("target", "drafter", "dflash", 2, numberings)
    assert part in measured.advice
    assert measured.as_dict()["best_shift"] == best
    if best:
        assert f'"aux_hidden_state_layer_ids": [{5 + best}, {9 + best}]' in measured.advice


def test_what_the_program_advises_mends_the_files(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = drafter(tmp_path / "drafter", target, layer=2, named=1)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    words = ["probe.py", str(directory), "--model", str(target), "--prompts", str(file)]
    monkeypatch.setattr("sys.argv", words)
    probing.main()
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert 'write "eagle_aux_hidden_state_layer_ids": [3] into' in advice
    config = json.loads((directory / "config.json").read_text())
    mended = {**config, "eagle_aux_hidden_state_layer_ids": [3]}
    (directory / "config.json").write_text(json.dumps(mended))
    probing.main()
    measured = json.loads(capsys.readouterr().out)
    assert (measured["kind"], measured["texts"], measured["best_shift"]) == ("eagle3", 2, 0)
    assert [row["layers"] for row in measured["numberings"]] == [[2], [1], [3]]
    monkeypatch.setattr("sys.argv", [words[0], str(tmp_path / "none"), *words[2:]])
    with pytest.raises(SystemExit, match="there is no directory"):
        probing.main()
