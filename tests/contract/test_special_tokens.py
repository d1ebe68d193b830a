"""Special tokens in the text, printed if a flag asks for them or a T5 fills in gaps, and the prefix
that a T5 wants before its prompts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load, stream_generate, stream_many

from .support import command
from .translators import translator

SENTINELS = ("<extra_id_1>", "<extra_id_0>")
GAPS = "a <extra_id_0> b"
FEW = ("-m", 3, "--num-draft", 2, "--proposer", "ngram", "--no-cost-cache")


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 whose last two tokens are sentinels, as in google/t5-v1_1-small."""
    directory = translator(tmp_path_factory.mktemp("filler"), extra=SENTINELS)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    first = len(content["model"]["vocab"]) - len(SENTINELS)
    like = content["added_tokens"][0]
    content["added_tokens"] += [
        {**like, "id": first + at, "content": text} for at, text in enumerate(SENTINELS)
    ]
    file.write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def vocabulary(filler: Path) -> list[str]:
    content = json.loads((filler / "tokenizer.json").read_text(encoding="utf-8"))
    return [piece for piece, _ in content["model"]["vocab"]]


@pytest.fixture(scope="module")
def pair(filler: Path) -> Any:
    return load(filler)


def only(token: int) -> tuple[object, ...]:
    """Return flags that let a model write no other token."""
    return (*FEW, "--logit-bias", f"{token}=1000")


def mixed(vocabulary: list[str], **settings: Any) -> Options:
    """Return options for 24 tokens: sentinels and a few words."""
    words = [id for id, piece in enumerate(vocabulary) if piece[0] == "▁"][:3]
    bias = dict.fromkeys([*words, len(vocabulary) - 2, len(vocabulary) - 1], 1000.0)
    how: dict[str, Any] = {"temperature": 2.0, "max_tokens": 24, "proposer": "ngram", **settings}
    return Options(logit_bias=bias, num_draft=2, cost_cache=False, **how)


def with_sentinels(vocabulary: list[str], tokens: tuple[int, ...]) -> str:
    """Return the text of words between sentinels: each stretch of words has no space around it."""
    texts, stretch = [], ""
    for token in tokens:
        if (piece := vocabulary[token]) not in SENTINELS:
            stretch += piece.replace("▁", " ")
            continue
        texts += [stretch.removeprefix(" "), piece]
        stretch = ""
    return "".join([*texts, stretch.removeprefix(" ")])


@pytest.mark.parametrize(("prompt", "show"), [("a b", True), (GAPS, False)])
def test_a_text_with_sentinels_is_the_same_streamed_and_at_the_end(
    pair: Any, vocabulary: list[str], prompt: str, show: bool
) -> None:
    options = mixed(vocabulary, show_special_tokens=show)
    run = stream_generate(pair, prompt, options)
    parts = [step.text for step in run]
    text = with_sentinels(vocabulary, run.result().tokens)
    assert all(piece in text for piece in SENTINELS)
    assert "".join(parts) == run.result().text == text
    assert sum(map(bool, parts)) > 3
    many = [step.result for step in stream_many(pair, [prompt, prompt], options) if step.result]
    assert [result.text for result in many] == [text, text]


def test_sentinels_are_written_if_they_are_asked_for_and_can_stop_a_text(
    pair: Any, vocabulary: list[str]
) -> None:
    result = generate(pair, "a b", mixed(vocabulary))
    words = [id for id in result.tokens if vocabulary[id] not in SENTINELS]
    assert result.text == "".join(vocabulary[id].replace("▁", " ") for id in words)[1:] != ""
    whole = generate(pair, GAPS, mixed(vocabulary)).text
    cut = generate(pair, GAPS, mixed(vocabulary, stop="<extra_id_1>"))
    assert (cut.text, cut.finish_reason) == (whole.partition("<extra_id_1>")[0], "stop")


def test_a_completion_of_special_tokens_says_how_to_print_them(t5: Path) -> None:
    words = ("generate", "a", "--model", t5)
    silent = command(*words, *only(2))
    assert (silent.code, silent.out) == (0, "\n")
    sentence = "the model wrote only special tokens: --show-special-tokens prints them"
    assert sentence in silent.err.splitlines()
    shown = command(*words, *only(2), "--show-special-tokens")
    assert shown.out == "<unk><unk><unk>\n" and "special tokens" not in shown.err
    for token in (0, 1):  # which pad or end a sequence, and are never printed
        done = command(*words, *only(token), "--show-special-tokens")
        assert done.out == "\n" and "wrote only special tokens" not in done.err


PREFIX = "translate: "


def prefixed(t5: Path, directory: Path, tasks: object) -> Path:
    """Copy a T5, and write into its config.json which prefixes tasks have."""
    made = shutil.copytree(t5, directory, dirs_exist_ok=True)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["task_specific_params"] = tasks
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Path(made)


def test_a_prompt_gets_the_prefix_unless_it_has_it_or_is_to_stay(t5: Path, tmp_path: Path) -> None:
    asking = load(prefixed(t5, tmp_path, {"translation": {"prefix": PREFIX, "num_beams": 4}}))

    def count(pair: Any, prompt: Any, **settings: Any) -> int:
        options = Options(max_tokens=0, **settings)
        return int(generate(pair, prompt, options).labels.prompt_tokens)

    plain = load(t5)
    with_prefix = count(plain, f"{PREFIX}Les pates")
    assert count(asking, "Les pates") == count(asking, f"{PREFIX}Les pates") == with_prefix
    assert (
        with_prefix > count(asking, "Les pates", chat_template=False) == count(plain, "Les pates")
    )
    assert count(asking, "translate:Les") == count(plain, "translate:Les")
    assert count(asking, [5, 6]) == 2
