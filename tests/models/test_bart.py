"""Files, beginnings, languages and shared encoders of BART and its kin."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import Options, generate, generate_many
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import beginning, encode
from mlx_specdec.errors import CheckpointError, OptionError
from mlx_specdec.models.bart import Bart, BartConfig
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel, share_equal_encoder
from mlx_specdec.models.loading import family_of_network, load_model
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.checkpoints import save
from ..support.pairs import BART, FIXTURES, pair_of, perturbed, translator

NAMES = sorted(path.name for path in BART.iterdir())
TOKENIZERS = BART.parent / "bart-tokenizers"


def directory_of(name: str) -> Path:
    return BART / name if name in NAMES else FIXTURES / name


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(BART / name / "expected.npz") as file:
        return {
            key: array.astype(np.int32) if array.dtype == np.int8 else array
            for key, array in file.items()
        }


def logits_of(model: EncoderDecoderModel, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Ours and transformers', without the columns of tokens that are never written."""
    wanted = expected(name)
    context = model.open_batch([wanted["source"].tolist()])
    logits = np.array(context.advance(mx.array(wanted["fed"][None])).logits[0])
    keep = np.setdiff1d(np.arange(logits.shape[1]), model.network.config.banned)
    return logits[:, keep], wanted["logits"][:, keep]


def config_of(name: str) -> dict[str, Any]:
    return json.loads((BART / name / "config.json").read_text())


def copied(name: str, path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """A fixture with another configuration; None deletes an entry."""
    shutil.copytree(BART / name, path)
    config = {**config_of(name), **changes}
    entries = {key: value for key, value in config.items() if key not in drop}
    (path / "config.json").write_text(json.dumps(entries))
    return path


# Beginnings and ends.


# Files.


def test_a_checkpoint_without_a_head_and_one_that_repeats_its_table_are_read(
    tmp_path: Path,
) -> None:
    weights: Any = dict(mx.load(str(BART / "bart" / "model.safetensors")))
    wanted = logits_of(translator("bart"), "bart")[0]
    table = weights["model.shared.weight"]
    bare = {name.removeprefix("model."): array for name, array in weights.items()}
    bare["final_logits_bias"] = weights["final_logits_bias"]
    again = weights | {
        f"model.{part}.embed_tokens.weight": table for part in ("encoder", "decoder")
    }
    without = {name: array for name, array in again.items() if name != "model.shared.weight"}
    for number, tensors in enumerate((bare, {**again, "lm_head.weight": table}, without)):
        path = copied("bart", tmp_path / str(number))
        save(path / "model.safetensors", tensors)
        assert (
            np.abs(logits_of(load_model(path, dtype="float32").model, "bart")[0] - wanted).max()
            == 0
        )
    path = copied("bart", tmp_path / "head")
    save(path / "model.safetensors", {**again, "lm_head.weight": 2 * table})
    with pytest.raises(CheckpointError, match="a head that is not its embedding"):
        load_model(path)


# Encoders that are shared.


def counted(model: EncoderDecoderModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the sources that a network encodes."""
    lengths: list[int] = []
    encode = type(model.network).encode

    def count(network: Any, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        lengths.extend([tokens.shape[1]] * tokens.shape[0])
        return encode(network, tokens, mask)

    monkeypatch.setattr(type(model.network), "encode", count)
    return lengths


@pytest.mark.parametrize("name", ["bart", "marian-two-vocabularies", "pegasus", "own-head-scaled"])
def test_an_equal_encoder_is_shared_and_runs_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distilbart has the encoder of bart-large unless the encoder was trained, too."""
    target, draft = translator(name), load_model(directory_of(name), dtype="float32").model
    for layer in draft.network.layers:
        perturbed(layer, 0.1)
    assert share_equal_encoder(draft, target)
    lengths, pair = counted(target, monkeypatch), pair_of(target, draft)
    prompts = [[5, 6, 7, 8, 2], [9, 10, 2], [11, 12, 13, 14, 15, 16, 2]]
    options = Options(max_tokens=12, num_draft=2, proposer="draft")
    plain = [generate(pair, prompt, replace(options, regular=True)).tokens for prompt in prompts]
    del lengths[:]
    assert [generate(pair, prompt, options).tokens for prompt in prompts] == plain
    assert [result.tokens for result in generate_many(pair, prompts, options)] == plain
    assert len(lengths) == 2 * len(prompts)


def test_an_encoder_with_one_other_number_or_other_heads_is_not_shared() -> None:
    target = translator("bart")
    changed = load_model(BART / "bart").model
    weight = changed.network.model.encoder.layers[1].fc2
    weight.bias = weight.bias.at[3].add(1e-6)
    config = copy.copy(target.network.config)
    layers, _, inner = config.encoder
    config.encoder = layers, 4, inner
    heads = Bart(config, has_bias=True)
    heads.update(target.network.parameters())
    for draft in (changed, EncoderDecoderModel(heads), translator("bart-scaled")):
        assert not share_equal_encoder(draft, target)


# Languages and tokenizers.


def speaking(name: str, **changes: Any) -> Pair:
    """A pair with a fixture's tokenizer and a model of its kind that knows as many tokens."""
    directory = TOKENIZERS / name
    tokenizer = load_tokenizer(directory, kind="encoder-decoder")
    kind = {"m2m100": "m2m100-unscaled"}.get(name, name)
    start = {} if name != "mbart" else {"decoder_start_token_id": None}
    config = {**config_of(kind), **start, "vocab_size": 256, "eos_token_id": 2, **changes}
    config = {key: value for key, value in config.items() if "decoder_vocab" not in key}
    network = Bart(BartConfig(config), has_bias=False)
    languages = family_of_network(network).languages(network, tokenizer)
    pair = pair_of(EncoderDecoderModel(network), None)
    return replace(pair, tokenizer=tokenizer, vocabulary=tokenizer.size, languages=languages)


@pytest.mark.parametrize(
    ("name", "begin", "end", "prefix"),
    [
        ("m2m100", ["__de__"], [2], [2, "__fr__"]),
        ("mbart", [], [2, "de_DE"], ["fr_XX"]),
        ("mbart-50", ["de_DE"], [2], [2, "fr_XX"]),
    ],
)
def test_languages_have_their_place_in_source_and_text(
    name: str, begin: list[Any], end: list[Any], prefix: list[Any]
) -> None:
    pair = speaking(name)
    ids = {piece: id for id, piece in enumerate(pair.tokenizer.pieces)}
    begin, end, prefix = ([ids.get(item, item) for item in part] for part in (begin, end, prefix))
    options = Options(target_lang="fr", source_lang="de")
    source = encode(pair, "la gare", options)
    assert source[: len(begin)] == begin and source[-len(end) :] == end
    assert sum(map(source.count, {*begin, *end} - {2})) == 1
    assert beginning(pair, source, options) == prefix
    with pytest.raises(OptionError, match="must be given"):
        encode(pair, "la gare", Options())
    with pytest.raises(OptionError, match="not 'xx'"):
        encode(pair, "la gare", Options(target_lang="xx"))


def test_a_language_that_the_model_is_made_for_need_not_be_named() -> None:
    for pair, start in (
        (speaking("mbart-50", forced_bos_token_id=70), [2, 70]),
        (speaking("mbart", decoder_start_token_id=71), [71]),
        (speaking("m2m100", forced_bos_token_id=90), [2, 90]),
    ):
        assert beginning(pair, [5, 2], Options()) == start
        assert len(beginning(pair, [5, 2], Options(target_lang="fr"))) == len(start)
