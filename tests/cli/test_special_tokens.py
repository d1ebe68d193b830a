"""Special tokens in the text, printed if a flag asks for them or a T5 fills in gaps, and the prefix
that a T5 wants before its prompts."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.engine.generate import stream_generate, stream_many
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import encode
from mlx_specdec.models.loading import task_prefix
from mlx_specdec.options import Options

from ..support.commands import Run, strict
from ..support.models import make_t5

SENTINELS = ("<extra_id_1>", "<extra_id_0>")
GAPS = "a <extra_id_0> b"
ONLY = ("-m", 3, "--num-draft", 2, "--proposer", "ngram", "--no-cache")


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 whose last two tokens are sentinels, as in google/t5-v1_1-small."""
    directory = make_t5(tmp_path_factory.mktemp("filler"), extra=SENTINELS)
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
def pair(filler: Path) -> Pair:
    return load(filler)


def flags_for(token: int) -> tuple[object, ...]:
    """Return flags that let a model write no other token."""
    return (*ONLY, "--logit-bias", f"{token}=1000")


def mixed(pair: Pair, **settings: Any) -> Options:
    """Return options for a text of 24 tokens: sentinels and a few words."""
    words = [id for id, piece in enumerate(pair.tokenizer.pieces()) if str(piece)[:1] == "▁"][:3]
    bias = dict.fromkeys([*words, pair.tokenizer.size - 2, pair.tokenizer.size - 1], 1000.0)
    how: dict[str, Any] = {"temperature": 2.0, "max_tokens": 24, "proposer": "ngram", **settings}
    return Options(logit_bias=bias, num_draft=2, cost_cache=False, **how)


def with_sentinels(pair: Pair, tokens: tuple[int, ...]) -> str:
    """Return the text of tokens, in which sentinels end a stretch of words."""
    texts, stretch = [], list[int]()
    for token in tokens:
        if token < pair.tokenizer.size - 2:
            stretch.append(token)
            continue
        texts += [pair.tokenizer.decode(stretch), str(pair.tokenizer.pieces()[token])]
        stretch = []
    return "".join([*texts, pair.tokenizer.decode(stretch)])


@pytest.mark.parametrize(("prompt", "show"), [("a b", True), (GAPS, False)])
def test_a_text_with_sentinels_is_the_same_streamed_and_at_the_end(
    pair: Pair, prompt: str, show: bool
) -> None:
    options = mixed(pair, show_special_tokens=show)
    run = stream_generate(pair, prompt, options)
    parts = [emission.text for emission in run]
    text = with_sentinels(pair, run.result().tokens)
    assert all(piece in text for piece in SENTINELS)
    assert "".join(parts) == run.result().text == text
    assert sum(map(bool, parts)) > 3
    many = [part.result for part in stream_many(pair, [prompt, prompt], options) if part.result]
    assert [result.text for result in many] == [text, text]


def test_a_text_with_words_has_no_sentinels_unless_they_are_asked_for(pair: Pair) -> None:
    result = stream_generate(pair, "a b", mixed(pair)).result()
    assert result.text == pair.tokenizer.decode(result.tokens) != ""
    assert "extra_id" not in result.text


def test_a_text_of_sentinels_alone_is_printed(run: Run, filler: Path, pair: Pair) -> None:
    flags = ("--model", filler, *flags_for(pair.tokenizer.size - 1))
    done = run("generate", "a b", *flags)
    assert (done.code, done.out) == (0, "<extra_id_0>" * 3 + "\n")
    assert "special tokens" not in done.err
    assert strict(run("generate", "a b", *flags, "--json").out)["text"] == "<extra_id_0>" * 3
    # Sentinels that a stop string might cut are not added at the end.
    assert run("generate", "a b", *flags, "--stop", "<extra_id_0>", "--quiet").out == "\n"


def test_sentinels_can_stop_a_text(pair: Pair) -> None:
    whole = stream_generate(pair, GAPS, mixed(pair)).result().text
    cut = stream_generate(pair, GAPS, mixed(pair, stop="<extra_id_1>")).result()
    assert (cut.text, cut.finish_reason) == (whole.partition("<extra_id_1>")[0], "stop")


def test_an_answer_of_special_tokens_says_how_to_print_them(run: Run, t5: Path) -> None:
    silent = run("generate", "a", "--model", t5, *flags_for(2))
    assert (silent.code, silent.out) == (0, "\n")
    sentence = "the model wrote only special tokens: --show-special-tokens prints them"
    assert sentence in silent.err.splitlines()
    shown = run("generate", "a", "--model", t5, *flags_for(2), "--show-special-tokens")
    assert shown.out == "<unk><unk><unk>\n" and "special tokens" not in shown.err


@pytest.mark.parametrize("token", [0, 1])
def test_tokens_that_pad_or_end_a_text_are_never_printed(run: Run, t5: Path, token: int) -> None:
    done = run("generate", "a", "--model", t5, *flags_for(token), "--show-special-tokens")
    assert done.out == "\n" and "wrote only special tokens" not in done.err


def test_batch_and_chat_print_special_tokens_too(
    run: Run, t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, texts = tmp_path / "prompts.txt", tmp_path / "texts.txt"
    prompts.write_text("a\nb\n")
    flags = ("--model", t5, *flags_for(2), "--show-special-tokens", "--quiet")
    assert run("batch", prompts, "--text", "--output", texts, *flags).code == 0
    assert texts.read_text() == "<unk><unk><unk>\n" * 2
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert run("chat", *flags).out == "<unk><unk><unk>\n"


SETTINGS = "translate: "
WEIGHTS = Path(__file__).parents[2] / "weights"


@pytest.fixture
def prefixed(t5: Path, tmp_path: Path) -> Path:
    """A T5 whose config.json asks for a prefix."""
    made = shutil.copytree(t5, tmp_path / "prefixed")
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["task_specific_params"] = {"translation": {"prefix": SETTINGS, "num_beams": 4}}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("tasks", "prefix"),
    [
        ({"a": {"prefix": "x: "}}, "x: "),
        ({"a": {"prefix": "x: "}, "b": {"prefix": "x: "}, "c": {}}, "x: "),
        ({"a": {"prefix": "x: "}, "b": {"prefix": "y: "}}, ""),
        ({"a": {"prefix": "  "}, "b": {"prefix": None}, "c": 3}, ""),
        ({}, ""),
        (None, ""),
        (["x: "], ""),
        ({"a": {"prefix": ["x: "]}}, ""),
    ],
)
def test_only_a_single_prefix_counts(tasks: Any, prefix: str) -> None:
    assert task_prefix({"task_specific_params": tasks}) == prefix


def test_a_prompt_gets_the_prefix_unless_it_has_it_or_is_to_stay(prefixed: Path) -> None:
    pair = load(prefixed)
    with_prefix = pair.tokenizer.encode(f"{SETTINGS}Les pates")
    assert encode(pair, "Les pates", Options()) == with_prefix
    assert encode(pair, f"{SETTINGS}Les pates", Options()) == with_prefix
    for prompt, options in (("translate:Les", Options()), ("Les", Options(chat_template=False))):
        assert encode(pair, prompt, options) == pair.tokenizer.encode(prompt)
    assert encode(pair, [5, 6], Options()) == [5, 6]


def test_generate_says_that_it_added_the_prefix(run: Run, prefixed: Path) -> None:
    arguments = ("--model", prefixed, "-m", 9)
    done, whole = (run("generate", text, *arguments) for text in ("Les", f"{SETTINGS}Les"))
    assert done.err.startswith(f'"{SETTINGS}" was put before the prompt') and done.out == whole.out
    assert "was put before" not in whole.err
    assert run("generate", "Les", *arguments, "--quiet").err == ""
