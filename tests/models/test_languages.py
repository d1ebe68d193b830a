"""White space of MADLAD-400, and languages on their way from a flag to a prompt."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, generate_many, load
from mlx_specdec.core.row import Request
from mlx_specdec.engine.opening import Opener
from mlx_specdec.engine.request import encode
from mlx_specdec.errors import OptionError
from mlx_specdec.models.encoder_decoder.family import Languages
from mlx_specdec.serve.internal import Chat, Sampled, Wanted
from mlx_specdec.serve.requests import LoadedModel, ServiceSettings

from ..support.tokenizers import sentence_piece

FIXTURE = Path(__file__).parents[1] / "fixtures" / "madlad"
SPACES = "def  f(x):\n\n    return x"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = shutil.copytree(FIXTURE, tmp_path_factory.mktemp("madlad") / "madlad-3b")
    tags = ["\n", "<2de>", "<2fr>", "<2pt_BR>"]
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
    sentence_piece(made, user_defined_symbols=tags, remove_extra_whitespaces=False, **ids)
    return made


@pytest.fixture(scope="module")
def pair(directory: Path) -> Any:
    return load(directory, dtype="float32")


def test_white_space_survives_and_no_sentinels_are_added(pair: Any, tmp_path: Path) -> None:
    ids = pair.tokenizer.encode(SPACES)
    assert ids[-1] == 2 and pair.tokenizer.decode(ids) == SPACES
    full = shutil.copytree(Path(pair.name), tmp_path / "full")
    pieces = pair.tokenizer.size - 100
    config = json.loads((full / "config.json").read_text())
    (full / "config.json").write_text(json.dumps({**config, "vocab_size": pieces}))
    from mlx_specdec.text.tokenizer import load_tokenizer

    assert load_tokenizer(full, kind="encoder-decoder").size == pieces


def test_a_language_becomes_the_tag_before_the_text(pair: Any) -> None:
    plain = Options(max_tokens=6)
    assert encode(pair, "<2fr> read", plain) == encode(
        pair, "read", replace(plain, target_lang="fr")
    )
    texts = {
        code: generate(pair, "read lines", replace(plain, target_lang=code)).tokens
        for code in ("fr", "de", "pt")
    }
    assert texts["pt"] == generate(pair, "<2pt_BR> read lines", plain).tokens
    many = generate_many(pair, ["read lines"], replace(plain, target_lang="de"))
    assert many[0].tokens == texts["de"]
    assert (
        texts["fr"] == generate(pair, "<2fr> read lines", replace(plain, proposer="ngram")).tokens
    )


def test_an_unknown_language_is_refused_with_the_known_ones(pair: Any) -> None:
    with pytest.raises(OptionError, match=r"target-lang .*'klingon': de, fr, pt_BR$"):
        generate(pair, "read", Options(target_lang="klingon"))
    nameless = replace(pair, languages=None)
    with pytest.raises(OptionError, match="names none"):
        generate(nameless, "read", Options(target_lang="fr"))


def test_a_language_may_be_the_beginning_of_the_text(pair: Any) -> None:
    class Forced(Languages):
        required = True

        def prefix(self, start, target):
            return [self.known[target]]

    forced = replace(pair, languages=Forced({"fr": 5, "de": 7}))
    opener = Opener(forced, Options(target_lang="de"), None, None, None, print, 1, True)
    row, _ = opener.row(0, Request([9, 2], Options(target_lang="de")))
    assert row.committed == [7] and row.position == 0
    with pytest.raises(OptionError, match=r"target-lang must be given.*: de, fr$"):
        opener.row(0, Request("read", Options()))


def test_a_body_names_the_languages_of_its_prompts(pair: Any) -> None:
    model = LoadedModel(pair, Options(), ServiceSettings(), "madlad")
    prepared = model.texts(["read", "lines"], Wanted(Sampled(target_lang="fr")))
    assert [each.prompt for each in prepared.requests] == [
        pair.tokenizer.encode("<2fr> read"),
        pair.tokenizer.encode("<2fr> lines"),
    ]
    messages = [{"role": "user", "content": "read"}]
    chat = model.chat(Chat(messages), Wanted(Sampled(target_lang="de")))
    assert chat.requests[0].prompt == pair.tokenizer.encode("<2de> read")
