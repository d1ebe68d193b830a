"""CodeT5's vocab.json and merges.txt, held to what transformers makes of the same texts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer
from mlx_specdec.text.vocabulary import common_size

CODET5 = Path(__file__).parents[1] / "fixtures" / "t5-text" / "codet5"
EXPECTED = json.loads((CODET5 / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The fixture's files, to be changed."""
    return Path(shutil.copytree(CODET5, tmp_path / "codet5"))


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_texts_become_the_ids_of_transformers_and_back() -> None:
    tokenizer = load_tokenizer(CODET5, kind="encoder-decoder")
    assert len(EXPECTED) >= 10
    for each in EXPECTED:
        assert tokenizer.encode(each["text"]) == each["ids"]
        assert tokenizer.decode(each["ids"]) == each["decoded"]


def test_special_tokens_are_known_and_sentinels_count_down_to_the_vocabulary() -> None:
    tokenizer = load_tokenizer(CODET5, kind="encoder-decoder")
    first = len(json.loads((CODET5 / "vocab.json").read_text(encoding="utf-8")))
    assert tokenizer.eos_token_ids == (2,) and tokenizer.size == first + 5
    assert tokenizer.special_ids == {0, 1, 2, 3, 4, *range(first, first + 5)}
    assert tokenizer.pieces()[-1] == "<extra_id_0>"


def test_without_any_other_file_the_vocabulary_is_roberta_s(files: Path) -> None:
    for file in files.iterdir():
        if file.name not in ("vocab.json", "merges.txt"):
            file.unlink()
    tokenizer = load_tokenizer(files, kind="encoder-decoder")
    plain = [each for each in EXPECTED if "<" not in each["text"]]
    assert len(plain) > 4
    for each in plain:
        assert tokenizer.encode(each["text"]) == each["ids"]


def test_gpt2_s_class_closes_no_text(files: Path) -> None:
    rewrite(
        files / "tokenizer_config.json", lambda told: told.update(tokenizer_class="GPT2Tokenizer")
    )
    tokenizer = load_tokenizer(files, kind="encoder-decoder")
    assert tokenizer.encode(EXPECTED[0]["text"]) == EXPECTED[0]["ids"][1:-1]
    assert tokenizer.eos_token_ids == (2,)


def test_sentinels_that_are_objects_keep_their_flags(files: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        tokens = told.pop("additional_special_tokens")
        told["additional_special_tokens"] = [{"content": each, "lstrip": True} for each in tokens]

    rewrite(files / "special_tokens_map.json", change)
    rewrite(files / "tokenizer_config.json", lambda told: told.pop("additional_special_tokens"))
    tokenizer = load_tokenizer(files, kind="encoder-decoder")
    top = tokenizer.size - 1
    assert tokenizer.encode("a <extra_id_0>")[1:] == [tokenizer.encode("a")[1], top, 2]


def test_nothing_but_the_tokenizers_library_is_needed() -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from mlx_specdec.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(Path(sys.argv[1]), kind='encoder-decoder').encode('a')\n"
        "assert not {'transformers', 'torch', 'mlx_lm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, CODET5], check=True)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("vocab.json", "[]", "vocab.json is not a JSON object"),
        ("vocab.json", '{"a": -1}', "vocab.json has ids that no model has"),
        ("vocab.json", '{"a": "1"}', "vocab.json has ids that no model has"),
        ("vocab.json", '{"a": 4294967296}', "vocab.json has ids that no model has"),
        ("vocab.json", '{"a": 0}', "do not fit"),
        ("merges.txt", "#version: 0.2\na\n", "invalid at line 1"),
        ("merges.txt", "a \n", "do not fit"),
        ("merges.txt", "zzz yyy\n", "do not fit"),
        ("merges.txt", "\udcff", "do not fit .*UTF-8"),
        ("added_tokens.json", '{"<extra_id_0>": "x"}', "no number"),
        ("added_tokens.json", '{"<extra_id_0>": 12}', "says '<extra_id_0>' is token 12"),
        ("tokenizer_config.json", '{"tokenizer_class": "BartTokenizer"}', "BartTokenizer"),
        ("special_tokens_map.json", "{", "special_tokens_map.json is not JSON"),
    ],
)
def test_damage_is_named_in_one_line(files: Path, file: str, content: str, told: str) -> None:
    (files / file).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=told) as error:
        load_tokenizer(files, kind="encoder-decoder")
    assert "\n" not in str(error.value)


def test_a_vocabulary_without_the_closing_token_is_named(files: Path) -> None:
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):
        (files / name).unlink()
    rewrite(files / "vocab.json", lambda told: told.pop("</s>"))
    with pytest.raises(CheckpointError, match=r"vocab\.json lacks '</s>'"):
        load_tokenizer(files, kind="encoder-decoder")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 400)
    | st.floats()
    | st.sampled_from(["", "</s>", "<s>", "<extra_id_0>", "Ġ", "\ud800", "a" * 300, "9" * 30]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["0", "2", "330", "x", "content", "lstrip"]), inner)
    ),
    max_leaves=6,
)
KEYS = ["added_tokens_decoder", "additional_special_tokens", "extra_ids", "eos_token", "cls_token"]
FILES = ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["codet5", "byt5"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(FILES), st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1))
def test_odd_settings_make_a_tokenizer_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, kind: str, file: str, odd: dict[str, Any]
) -> None:
    directory = tmp_path_factory.mktemp("odd")
    shutil.copytree(CODET5.with_name(kind), directory, dirs_exist_ok=True)
    content = {"tokenizer_class": "ByT5Tokenizer"} if kind == "byt5" else {}
    (directory / file).write_text(json.dumps({**content, **odd}), encoding="utf-8")
    try:
        tokenizer = load_tokenizer(directory, kind="encoder-decoder")
    except CheckpointError as problem:
        assert "\n" not in str(problem)
    else:
        ids = tokenizer.encode("a <extra_id_0> é </s> b")
        assert all(0 <= id < tokenizer.size == len(tokenizer.pieces()) for id in ids)
        assert "a" in tokenizer.decode(ids)


# ByT5's bytes, held to what transformers makes of the same texts.


BYT5_FILES = Path(__file__).parents[1] / "fixtures" / "t5-text" / "byt5"
BYT5 = load_tokenizer(BYT5_FILES, kind="encoder-decoder")
Load = Callable[..., Tokenizer]
SENTINELS = [f"<extra_id_{index}>" for index in range(125)]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A ByT5's tokenizer from settings and added tokens."""

    def loaded(said: dict[str, Any], added: dict[str, Any] | None = None) -> Tokenizer:
        settings = {"tokenizer_class": "ByT5Tokenizer", **said}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "added_tokens.json").write_text(json.dumps(added or {}))
        return load_tokenizer(tmp_path, kind="encoder-decoder")

    return loaded


def test_bytes_become_the_ids_of_transformers_and_back() -> None:
    known = json.loads((BYT5_FILES / "expected.json").read_text(encoding="utf-8"))
    assert len(known) >= 10
    for each in known:
        if each["text"] is not None:
            assert BYT5.encode(each["text"]) == each["ids"]
        # transformers leaves out bytes that are no UTF-8; here they are shown, as of any other.
        assert BYT5.decode(each["ids"]).replace("\ufffd", "") == each["decoded"]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"extra_ids": 125},
        {"extra_ids": 125, "additional_special_tokens": SENTINELS},
        {"extra_ids": 0, "extra_special_tokens": [{"content": token} for token in SENTINELS]},
        {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None},
    ],
)
def test_every_way_to_write_the_settings_means_the_same_ids(
    load: Load, said: dict[str, Any]
) -> None:
    tokenizer = load(said)
    assert tokenizer.size == 384 and tokenizer.eos_token_ids == (1,)
    assert tokenizer.encode("<extra_id_0>a<extra_id_124><extra_id_12>") == [259, 100, 383, 271, 1]
    assert tokenizer.special_ids == {0, 1, 2, *range(259, 384)}


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_the_class_is_found_in_either_file(tmp_path: Path, where: str) -> None:
    (tmp_path / where).write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    tokenizer = load_tokenizer(tmp_path, kind="encoder-decoder")
    assert tokenizer.encode("é") == [198, 172, 1] and tokenizer.size == 384


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text().filter(lambda text: not any(name in text for name in ("<", ">"))))
def test_any_text_survives_and_ends_once(text: str) -> None:
    ids = BYT5.encode(text)
    assert len(ids) == len(text.encode()) + 1 and ids.count(1) == 1
    assert BYT5.decode(ids) == text


def test_spaces_around_the_end_token_belong_to_it_unless_a_file_says_no(load: Load) -> None:
    kept = {"eos_token": {"content": "</s>", "lstrip": False, "rstrip": False}}
    assert load({}).encode("a </s> b") == [100, 1, 101, 1]
    assert load(kept).encode("a </s> b") == [100, 35, 1, 35, 101, 1]
    assert load({}).encode("a</s>") == [100, 1]


def test_pieces_name_every_id_and_compare_with_another_byte_tokenizer(load: Load) -> None:
    tokenizer = load({})
    pieces = tokenizer.pieces()
    assert len(pieces) == 384 and None not in pieces and len(set(pieces)) == 384
    assert pieces[:4] == ["<pad>", "</s>", "<unk>", "Ā"] and pieces[ord("a") + 3] == "a"
    assert common_size(tokenizer, load({"extra_ids": 100}), 384, 384) == 384


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({"extra_ids": -1}, {}),
        ({"extra_ids": "many"}, {}),
        ({"extra_ids": 10**9}, {}),
        ({}, {"<a>": 100}),
        ({}, {"<a>": "first"}),
        ({}, {"<a>": [1]}),
        ({"added_tokens_decoder": {"x": {"content": "<a>"}}}, {}),
        ({"eos_token": "<pad>"}, {}),
        ({"eos_token": "a"}, {}),
        ({"added_tokens_decoder": {"99999999999": {"content": "<a>"}}}, {}),
    ],
)
def test_what_contradicts_the_convention_is_one_sentence(
    load: Load, said: dict[str, Any], added: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as told:
        load(said, added)
    assert "\n" not in str(told.value)
