"""Every family of T5 loads as people download it, and converts, to what transformers computes.

The fixtures are written by tests/fixtures/make_t5.py: names, entries of config.json and
file formats of the real checkpoints, tiny sizes.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints.files import Weights
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import compare_logits
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.models.loading import load_model
from mlx_specdec.options import Options

FIXTURES = Path(__file__).parents[1] / "fixtures"
FAMILIES = sorted(path.name for path in (FIXTURES / "t5-families").iterdir())
TIED = ("codet5", "t5", "t5-efficient")
TEXTS = {"byt5": "byt5", "codet5": "codet5"}
"""Families whose tokenizer is a fixture as well."""
TOLERANCE = 1e-4


def difference(directory: Path, expected: Path) -> float:
    """The largest between a model's log-probabilities and those in a fixture."""
    with np.load(expected / "expected.npz") as file:
        expected_values = dict(file)
    context = load_model(directory, dtype="float32").model.open(expected_values["source"].tolist())
    logits = context.advance(mx.array(expected_values["target"][None])).logits
    found = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
    return float(np.abs(found - expected_values["log_p"]).max())


def with_tokenizer(family: str, place: Path) -> Path:
    """Return the family's checkpoint with a tokenizer."""
    shutil.copytree(FIXTURES / "t5-families" / family, place)
    shutil.copytree(FIXTURES / "t5-text" / TEXTS[family], place, dirs_exist_ok=True)
    return place


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_does_loaded_and_converted(
    tmp_path: Path, family: str
) -> None:
    source, out = FIXTURES / "t5-families" / family, tmp_path / family
    assert difference(source, source) <= TOLERANCE
    report = convert(str(source), out, compare_logits=compare_logits)
    assert difference(out, source) <= TOLERANCE
    assert report.verified.logits is not None and report.verified.logits <= TOLERANCE
    names = Weights(out).infos.keys()
    assert ("lm_head.weight" in names) is (family not in TIED)
    assert not [name for name in names if "embed_tokens" in name or "EncDecAttention.rel" in name]
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["scale_decoder_outputs"] is (family in TIED)


@pytest.mark.parametrize("family", sorted(TEXTS))
def test_text_goes_through_the_familys_own_tokenizer(tmp_path: Path, family: str) -> None:
    source = with_tokenizer(family, tmp_path / "source")
    convert(str(source), tmp_path / "out")
    options = Options(max_tokens=12, num_draft=3, seed=3, temperature=1.0)
    texts = []
    for directory in (source, tmp_path / "out"):
        pair = load(directory, directory)
        assert pair.eos_token_ids == {2 if family == "codet5" else 1}
        assert pair.vocabulary == json.loads((source / "config.json").read_text())["vocab_size"]
        texts.append(generate(pair, "def f(x):", options).text)
    assert texts[0] == texts[1]


def test_ids_that_only_pad_the_models_vocabulary_are_never_chosen(tmp_path: Path) -> None:
    source, out = with_tokenizer("codet5", tmp_path / "source"), tmp_path / "out"
    for name in ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"):
        (source / name).unlink()
    convert(str(source), out)
    options, prompt, padding = Options(max_tokens=1), [5, 6, 2], 332
    first = generate(load(out), prompt, options).tokens[0]
    weights = dict(mx.load(str(out / "model.safetensors")))
    shared = np.array(weights["shared.weight"])
    shared[padding] = 10 * shared[first]
    mx.save_safetensors(
        str(out / "model.safetensors"), {**weights, "shared.weight": mx.array(shared)}
    )
    pair = load(out)
    assert pair.vocabulary == 330 < pair.target.vocabulary == 335
    fed = mx.array([pair.target.prefix(prompt)])
    assert mx.argmax(pair.target.open(prompt).advance(fed).logits).item() == padding
    assert generate(pair, prompt, options).tokens[0] == first
