"""Meta's own layout: what comes out computes what a reference with Meta's rotation does."""

from __future__ import annotations

import base64
import gc
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec import Options, generate, load
from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.formats.meta import MetaFile, read_params, rotary_rows
from mlx_specdec.checkpoints.formats.vocabularies import read_tokenizer
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import compare_logits
from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.file_tokenizer import FileTokenizer
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.meta_files import CLOSE, META, change_part, copy_meta, distance, read_part

MODELS = ("llama1", "llama2", "llama3")
FIRST, SECOND = "consolidated.00.pth", "consolidated.01.pth"


def refusal(source: Path, out: Path) -> str:
    """The one sentence that a conversion ends with; nothing is left at `out`."""
    with pytest.raises(CheckpointError) as caught:
        convert(str(source), out)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500 and "/mlx-specdec-" not in text
    assert not out.exists()
    return text


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_what_the_reference_does(tmp_path: Path, name: str) -> None:
    report = convert(str(META / name), tmp_path / "out", compare_logits=compare_logits)
    assert report.verified.logits == 0.0
    assert distance(report.path, META / name / "expected.npz") < CLOSE


def test_a_model_is_loaded_directly_and_writes_what_its_conversion_writes(tmp_path: Path) -> None:
    out = convert(str(META / "llama3"), tmp_path / "out").path
    options = Options(max_tokens=12, temperature=0.0, regular=True)
    sequences = {
        tuple(generate(load(str(model)), "Once upon a time", options).tokens)
        for model in (META / "llama3", out)
    }
    assert len(sequences) == 1


def test_what_is_laid_down_on_the_way_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copy_meta("llama3", tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    pair = load(str(source))
    assert len(list(scratch.iterdir())) == 1
    del pair
    gc.collect()
    assert not any(scratch.iterdir())
    (source / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError):
        load(str(source))
    assert not any(scratch.iterdir())


def test_a_model_without_a_tokenizer_converts_and_says_so(tmp_path: Path) -> None:
    source = copy_meta("llama3", tmp_path)
    (source / "tokenizer.model").unlink()
    assert "no tokenizer files" in convert(str(source), tmp_path / "out").describe()


UNSAID: list[tuple[dict[str, Any], int, float | None]] = [
    ({"norm_eps": 1e-6}, 2048, None),
    ({"norm_eps": 1e-5}, 4096, None),
    ({"rope_theta": 1_000_000.0}, 16384, None),
    ({"rope_theta": 500_000.0}, 8192, None),
    ({"rope_theta": 12_345.0}, 4096, None),
    ({"rope_theta": 500_000.0, "max_seq_len": 77}, 77, None),
    ({"rope_theta": 500_000.0, "use_scaled_rope": True}, 131_072, 8.0),
    ({"dim": 2048, "n_layers": 16, "use_scaled_rope": True}, 131_072, 32.0),
    ({"dim": 3072, "n_layers": 28, "use_scaled_rope": True}, 131_072, 32.0),
    ({"dim": 3072, "n_layers": 32, "use_scaled_rope": True}, 131_072, 8.0),
    ({"use_scaled_rope": True, "rope_scaling_factor": 4}, 131_072, 4.0),
]


def test_what_params_json_leaves_unsaid(tmp_path: Path) -> None:
    """As Hugging Face's config.json of each generation has it."""
    file = tmp_path / "params.json"
    for said, length, factor in UNSAID:
        file.write_text(json.dumps({"dim": 4096, "n_layers": 32, "n_heads": 32, **said}))
        config = read_params(file)
        stretched = config.get("rope_scaling", {}).get("factor")
        assert (config["max_position_embeddings"], stretched) == (length, factor)


def test_stretched_positions_are_what_makes_llama_3_1_agree(tmp_path: Path) -> None:
    source = copy_meta("llama3", tmp_path, {"use_scaled_rope": False})
    report = convert(str(source), tmp_path / "out")
    assert distance(report.path, META / "llama3" / "expected.npz") > 100 * CLOSE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [{"shard_bytes": 10_000}, {"dtype": "float32"}])
def test_shards_and_types_do_not_change_what_is_computed(
    tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    out = convert(str(META / name), tmp_path / "out", **how).path
    assert distance(out, META / name / "expected.npz") < CLOSE


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_any_rows_of_a_joined_tensor_are_those_of_the_whole(name: str) -> None:
    model = MetaFile(META / name / FIRST)
    for ours, info in model.infos.items():
        whole = model.rows(ours, 0, info.extent)
        assert whole.shape == info.shape
        for begin, end in ((0, 1), (3, 13), (info.extent // 2 - 1, info.extent // 2 + 2)):
            end = min(end, info.extent)
            assert mx.array_equal(model.rows(ours, begin, end), whole[begin:end]).item()


def test_parts_are_joined_along_the_axes_that_metas_layers_cut(tmp_path: Path) -> None:
    first, second = (read_part(META / "llama2" / name) for name in (FIRST, SECOND))
    model = MetaFile(META / "llama2" / FIRST)
    for ours, theirs, axis in (
        ("model.embed_tokens.weight", "tok_embeddings.weight", 1),
        ("lm_head.weight", "output.weight", 0),
        ("model.layers.1.self_attn.v_proj.weight", "layers.1.attention.wv.weight", 0),
        ("model.layers.1.self_attn.o_proj.weight", "layers.1.attention.wo.weight", 1),
        ("model.layers.0.mlp.gate_proj.weight", "layers.0.feed_forward.w1.weight", 0),
        ("model.layers.0.mlp.down_proj.weight", "layers.0.feed_forward.w2.weight", 1),
    ):
        joined = mx.concatenate([first[theirs], second[theirs]], axis=axis)
        assert mx.array_equal(model.rows(ours, 0, joined.shape[0]), joined).item()


def test_rotary_rows_list_the_first_of_each_pair_and_then_the_second() -> None:
    assert rotary_rows(0, 12, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert rotary_rows(4, 8, 6).tolist() == [3, 5, 6, 8]


def test_configurations_say_what_params_json_does(tmp_path: Path) -> None:
    found = {name: config_of(convert(str(META / name), tmp_path / name).path) for name in MODELS}
    assert found["llama1"]["intermediate_size"] == 88
    assert found["llama2"]["intermediate_size"] == 112
    assert found["llama1"]["vocab_size"] == 340
    assert [found[name]["num_key_value_heads"] for name in MODELS] == [4, 2, 2]
    assert [found[name]["max_position_embeddings"] for name in MODELS] == [2048, 4096, 131072]
    assert [found[name]["rms_norm_eps"] for name in MODELS] == [1e-6, 1e-5, 1e-5]
    assert found["llama3"]["rope_theta"] == 500000.0
    assert found["llama3"]["rope_scaling"]["factor"] == 8.0
    assert found["llama3"]["eos_token_id"] == [321, 328, 329]
    assert (found["llama2"]["bos_token_id"], found["llama2"]["eos_token_id"]) == (1, 2)


def test_feed_forward_widths_are_those_of_the_published_models(tmp_path: Path) -> None:
    file = tmp_path / "params.json"
    for inner, said in (
        (11008, {"dim": 4096, "multiple_of": 256}),
        (28672, {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}),
        (14336, {"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}),
        (8192, {"dim": 2048, "multiple_of": 256, "ffn_dim_multiplier": 1.5}),
        (14336, {"dim": 4096, "hidden_dim": 14336}),
    ):
        file.write_text(json.dumps({"n_heads": 32, "n_layers": 2, **said}), encoding="utf-8")
        assert read_params(file)["intermediate_size"] == inner


@pytest.mark.parametrize("stored", [True, False])
def test_a_head_that_repeats_the_embedding_is_left_out(tmp_path: Path, stored: bool) -> None:
    source = copy_meta("llama1", tmp_path)

    def tie(weights: dict[str, mx.array]) -> None:
        weights["layers.0.attention.inner_attention.rope.freqs"] = mx.zeros(4)
        del weights["output.weight"]
        if stored:
            weights["output.weight"] = weights["tok_embeddings.weight"]

    change_part(source / FIRST, tie)
    out = convert(str(source), tmp_path / "out", compare_logits=compare_logits).path
    assert config_of(out)["tie_word_embeddings"] is True
    assert "lm_head.weight" not in files.Weights(out).infos


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    source = copy_meta("llama2", tmp_path)
    (source / FIRST).rename(tmp_path / "kept")
    assert "lacks consolidated.00.pth" in refusal(source, tmp_path / "out")
    (tmp_path / "kept").rename(source / FIRST)
    (source / SECOND).rename(source / "consolidated.02.pth")
    assert "lacks consolidated.01.pth" in refusal(source, tmp_path / "out")
    (source / "consolidated.02.pth").unlink()
    assert "a part may be missing" in refusal(source, tmp_path / "out")


def test_a_part_of_another_model_is_told(tmp_path: Path) -> None:
    source = copy_meta("llama2", tmp_path)

    def other(weights: dict[str, mx.array]) -> None:
        weights["norm.weight"] = weights["norm.weight"] + 1

    change_part(source / SECOND, other)
    assert "parts of different models: their norm.weight differ" in refusal(
        source, tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("layers.1.ffn_norm.weight"), "lacks layers.1.ffn_norm.weight"),
        (lambda w: w.update(extra=mx.zeros(2)), "holds 'extra'"),
        (lambda w: w.pop("tok_embeddings.weight"), "lacks tok_embeddings.weight"),
        (
            lambda w: w.update({"output.weight": mx.zeros((340, 32), mx.int32)}),
            "stores output.weight as I32",
        ),
        (
            lambda w: w.update({"output.weight": mx.zeros(340)}),
            "output.weight of another shape",
        ),
        (
            lambda w: w.update({"layers.0.attention.wo.weight": mx.zeros((32, 0))}),
            "has shape (32, 0) in each of 1 parts",
        ),
    ],
)
def test_tensors_that_are_not_as_expected_are_named(
    tmp_path: Path, change: Any, words: str
) -> None:
    source = copy_meta("llama1", tmp_path)
    change_part(source / FIRST, change)
    assert words in refusal(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"dim": 64}, "params.json asks for"),
        ({"dim": None}, "needs dim"),
        ({"dim": "32"}, "needs dim"),
        ({"dim": -32}, "needs dim"),
        ({"n_layers": 10**12}, "needs n_layers"),
        ({"n_layers": 10**9}, "asks for 1000000000 layers"),
        ({"n_layers": 500}, "lacks layers.2."),
        ({"n_layers": 1}, "holds 'layers.1."),
        ({"n_layers": 3}, "lacks layers.2."),
        ({"n_heads": 5}, "5 heads in a width of 32"),
        ({"n_heads": 32}, "heads of width 1"),
        ({"n_kv_heads": 3}, "4 heads that share 3 keys"),
        ({"n_kv_heads": 4}, "layers.0.attention.wk.weight"),
        ({"vocab_size": 32000}, "asks for 32000 tokens where the weights have 340"),
        ({"ffn_dim_multiplier": 1e300}, "needs ffn_dim_multiplier"),
        ({"ffn_dim_multiplier": 1e11}, "asks for inner"),
        ({"multiple_of": 0}, "needs multiple_of"),
        ({"norm_eps": float("nan")}, "needs norm_eps"),
        ({"rope_theta": True}, "needs rope_theta"),
        ({"use_scaled_rope": "yes"}, "use_scaled_rope"),
        ({"moe": {"num_experts": 8}}, "asks for 'moe', which is not supported"),
    ],
)
def test_a_params_json_that_lies_is_one_sentence(
    tmp_path: Path, params: dict[str, Any], words: str
) -> None:
    source = copy_meta("llama2", tmp_path, params)
    text = refusal(source, tmp_path / "out")
    assert words in text and str(source) in text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "\x00", '{"dim": 1' + "0" * 5000 + "}"]
)
def test_a_params_json_that_is_none_is_one_sentence(tmp_path: Path, text: str) -> None:
    source = copy_meta("llama2", tmp_path)
    (source / "params.json").write_text(text, encoding="utf-8")
    assert "params.json" in refusal(source, tmp_path / "out")
    (source / "params.json").unlink()
    assert "lacks params.json" in refusal(source, tmp_path / "out")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_part_is_one_sentence(tmp_path: Path, share: float) -> None:
    source = copy_meta("llama2", tmp_path)
    data = (source / SECOND).read_bytes()
    (source / SECOND).write_bytes(data[: int(share * len(data))])
    assert SECOND in refusal(source, tmp_path / "out")


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([1])
KEYS = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "norm_eps")
MORE = ("ffn_dim_multiplier", "rope_theta", "use_scaled_rope", "hidden_dim", "head_dim")


@given(st.dictionaries(st.sampled_from((*KEYS, *MORE)), VALUES, max_size=4))
@settings(max_examples=200, deadline=None)
def test_whatever_params_json_says_the_worst_is_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, change: dict[str, Any]
) -> None:
    source = tmp_path_factory.mktemp("fuzz")
    for name in (FIRST, SECOND):
        (source / name).symlink_to(META / "llama2" / name)
    usual = json.loads((META / "llama2" / "params.json").read_text(encoding="utf-8"))
    (source / "params.json").write_text(json.dumps({**usual, **change}), encoding="utf-8")
    try:
        read_params(source / "params.json")
        model = MetaFile(source / FIRST)
    except CheckpointError as problem:
        assert "\n" not in str(problem) and len(str(problem)) < 500
    else:
        assert model.config["hidden_size"] == 32 and len(model.infos) == 21


# Meta's tokenizers: the ids that sentencepiece and tiktoken give, out of tokenizer.json.


EXPECTED = json.loads((META / "expected_ids.json").read_text(encoding="ascii"))
SENTENCEPIECE, TIKTOKEN = META / "tokenizer.model", META / "llama3" / "tokenizer.model"


def loaded(file: Path, directory: Path, vocabulary: int) -> FileTokenizer:
    """What is made of a tokenizer file, as the rest of the program reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in read_tokenizer(file, vocabulary).files.items():
        (directory / name).write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(directory, kind="decoder-only")
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def tokenizer_refusal(file: Path, vocabulary: int = 340) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(file, vocabulary)
    text = str(caught.value)
    assert text.startswith(str(file)) and "\n" not in text and len(text) < len(str(file)) + 300
    return text


def test_ids_are_those_of_sentencepiece_behind_the_beginning(tmp_path: Path) -> None:
    tokenizer = loaded(SENTENCEPIECE, tmp_path, 340)
    for text, ids in EXPECTED["sentencepiece"].items():
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode([1, *ids, 2]) == text
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == {0, 1, 2}


def test_ids_are_those_of_tiktoken_behind_the_beginning(tmp_path: Path) -> None:
    tokenizer = loaded(TIKTOKEN, tmp_path, 576)
    for text, ids in EXPECTED["tiktoken"].items():
        assert tokenizer.encode(text) == [320, *ids]
        assert tokenizer.decode([320, *ids, 321]) == text
    assert tokenizer.size == 576
    assert tokenizer.encode("<|eot_id|>") == [320, 329]


@pytest.mark.slow
@given(st.text(max_size=40) | st.text(alphabet="Ontlie d,\n\t3'▁", max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_gets_the_ids_of_sentencepiece(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    if any(token in text for token in ("<s>", "</s>", "<unk>")):
        return  # names of control tokens become these tokens here
    tokenizer = loaded(SENTENCEPIECE, tmp_path_factory.mktemp("text"), 340)
    assert tokenizer.encode(text) == [1, *processor.encode(text)]


@pytest.mark.parametrize("since_31", [False, True])
def test_llama_3s_special_tokens_lie_where_its_generation_has_them(since_31: bool) -> None:
    made = read_tokenizer(TIKTOKEN, 576, since_31=since_31)
    added = json.loads(made.files["tokenizer.json"])["added_tokens"]
    names = {token["content"]: token["id"] - 320 for token in added}
    assert len(names) == 256 and all(token["special"] for token in added)
    for place, name in ((0, "begin_of_text"), (1, "end_of_text"), (6, "start_header_id")):
        assert names[f"<|{name}|>"] == place
    assert names["<|eot_id|>"] == 9
    assert names.get("<|eom_id|>") == (8 if since_31 else None)
    assert names["<|reserved_special_token_2|>"] == (5 if since_31 else 4)
    assert names["<|reserved_special_token_247|>"] == (255 if since_31 else 252)
    assert made.ids["eos_token_id"] == ([321, 328, 329] if since_31 else [321, 329])


def test_mlx_lms_way_of_loading_a_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, kind in (("llama2", "sentencepiece"), ("llama3", "tiktoken")):
        out = convert(str(copy_meta(name, tmp_path)), tmp_path / f"{name}-out").path
        tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
        for text, ids in EXPECTED[kind].items():
            assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]


def test_the_tokenizer_beside_the_folder_is_taken_where_the_folder_has_none(tmp_path: Path) -> None:
    source = copy_meta("llama1", tmp_path)
    own = convert(str(source), tmp_path / "first").path / "tokenizer.json"
    shutil.copy(SENTENCEPIECE, source)
    (tmp_path / "tokenizer.model").unlink()
    assert (convert(str(source), tmp_path / "second").path / own.name).read_bytes() == (
        own.read_bytes()
    )


def test_a_tokenizer_of_another_model_is_refused() -> None:
    assert "340 tokens where the model knows 339" in tokenizer_refusal(SENTENCEPIECE, 339)
    assert "320 tokens and 256 special ones" in tokenizer_refusal(TIKTOKEN, 575)


def test_a_model_may_know_more_ids_than_its_tokenizer(tmp_path: Path) -> None:
    assert loaded(SENTENCEPIECE, tmp_path, 384).size == 340
    assert read_tokenizer(TIKTOKEN, 1000).size == 576


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:500], "line"),
        (lambda data: data + b"!\n", "line 321"),
        (lambda data: data + line(b"xyz", 400), "line 321"),
        (lambda data: data + line(b"xyz", "9" * 5000), "line 321"),
        (lambda data: data + b"QQ=A 320\n", "line 321"),
        (lambda data: data + line(b"a", 320), "line 321"),
        (lambda data: data + line(b"a" * 2000, 320), "line 321"),
        (lambda data: line(b"\xff", 0) + line(b"b", 1), "single bytes"),
    ],
)
def test_a_damaged_tiktoken_file_is_one_sentence(tmp_path: Path, change: Any, words: str) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(change(TIKTOKEN.read_bytes()))
    assert words in tokenizer_refusal(file, 1000)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"no tokenizer", bytes(100), b"\xff" * 100])
def test_a_damaged_sentencepiece_model_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(data)
    tokenizer_refusal(file)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_to_a_tokenizer_is_at_worst_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    known = [(TIKTOKEN, 576), (SENTENCEPIECE, 340)]
    source, vocabulary = data.draw(st.sampled_from(known))
    whole = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("fuzz") / source.name
    file.write_bytes(whole[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])
    try:
        assert read_tokenizer(file, vocabulary).size <= vocabulary
    except CheckpointError as problem:
        assert "\n" not in str(problem) and len(str(problem)) < 400
