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
from mlx_specdec.text.tokenizer import load_tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "t5-text" / "codet5"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The fixture's files, to be changed."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "codet5"))


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_texts_become_the_ids_of_transformers_and_back() -> None:
    tokenizer = load_tokenizer(FIXTURE, kind="encoder-decoder")
    assert len(EXPECTED) >= 10
    for each in EXPECTED:
        assert tokenizer.encode(each["text"]) == each["ids"]
        assert tokenizer.decode(each["ids"]) == each["decoded"]


def test_special_tokens_are_known_and_sentinels_count_down_to_the_vocabulary() -> None:
    tokenizer = load_tokenizer(FIXTURE, kind="encoder-decoder")
    first = len(json.loads((FIXTURE / "vocab.json").read_text(encoding="utf-8")))
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
    subprocess.run([sys.executable, "-c", script, FIXTURE], check=True)


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
    shutil.copytree(FIXTURE.with_name(kind), directory, dirs_exist_ok=True)
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
