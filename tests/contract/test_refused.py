"""Wrong input is refused in one line that says what is wrong, and leaves nothing behind."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ..support.commands import MEMORY, SAID
from .interruption import each_computation
from .support import ROOT, checkpoint, command
from .translators import translator

PROMPT = "Les pates"
FIXTURES = ROOT / "tests" / "fixtures"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"1" * 64 + b"\nsize 9\n"
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'

FILES = {
    "prompts.txt": b"some words\nother words\n",
    "latin.txt": b"\xe9t\xe9",
    "empty.txt": b"",
    "program": b"\x7fELF\0\0",
    "blank.txt": b"\n \n",
    "text": b"def",
    "binary": b"\xff\xfe",
}
"""Files that hold prompts, no prompt, or no text."""
LINES: list[tuple[str, str | list[str], list[str]]] = [
    (begin, words, parts)
    for begin, rows in json.loads(Path(__file__).with_name("refused.json").read_text()).items()
    for words, *parts in rows
]
"""The beginning of a command, its other words, and parts of the line. {t5} and {llama} are models,
and a word `asked:TEXT` is a file with this text. Models that are named ./nowhere would be said to
be missing if the flags were right."""
LINES += [
    ("generate Les --model ./nowhere", f"{flag} asked:{text}", [part])
    for flag, text, part in (
        ("--json-schema", '{"items":' * 20000, "too many brackets in each other"),
        ("--json-schema", "1" * 300_000, "more than 262144 characters"),
        ("--grammar", "start:" + "(" * 9999, "too deeply nested"),
    )
]


@pytest.mark.parametrize(
    ("begin", "words", "parts"), LINES, ids=[f"{one[0]} {one[1]}"[:70] for one in LINES]
)
def test_wrong_words_are_one_line_and_nothing_is_written(
    begin: str,
    words: str | list[str],
    parts: list[str],
    t5: Path,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("weights").symlink_to(ROOT / "weights")
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    given = [*begin.split(), *(words.split(" ") if isinstance(words, str) else words)]
    if (asked := given[-1].partition("asked:"))[1]:
        Path("asked").write_text(asked[2])
        given[-1] = "asked"
    places = {"{t5}": str(t5), "{llama}": str(llama)}
    before = sorted(Path().iterdir())
    command(*(places.get(word, word) for word in given)).refuses(*parts)
    assert sorted(Path().iterdir()) == before


def test_models_that_do_not_fit_the_input_or_each_other_are_refused(
    t5: Path, tmp_path: Path
) -> None:
    short = checkpoint(tmp_path / "short", max_position_embeddings=16)
    command("generate", "def f(x):\n" * 9, "--model", short).refuses("16")
    other = translator(tmp_path / "other") / "tokenizer.json"
    other.write_text(other.read_text().replace('"▁midi,"', '"▁noon,"'))
    done = command("generate", PROMPT, "--model", t5, "--draft-model", other.parent)
    done.refuses("'▁midi,' in the target and '▁noon,' in the draft")


def test_completions_that_a_vocabulary_cannot_write_are_refused(tmp_path: Path) -> None:
    """The shipped translator's has no braces, and no letters but French and English ones."""
    model = ("--model", ROOT / "weights" / "t5-enfr-draft", "--no-cost-cache", "--quiet")
    words = ("generate", "translate English to French: I am cold.", *model)
    command(*words, "--json-schema", SCHEMA).refuses("has no token that may come first")
    later = command(*words, "--regex", "Je suis 日本")
    assert later.code == 2 and "the model has no token for what must follow" in later.err


@pytest.fixture(scope="module")
def computations(llama: Path) -> int:
    """Return how often MLX is asked to compute until two tokens are written."""
    asked: list[int] = []
    with each_computation(asked.append):
        assert command("generate", PROMPT, "--model", llama, "--no-cost-cache", "-m", 2).code == 0
    return asked[-1]


@pytest.mark.parametrize("metal", [False, True])
@pytest.mark.parametrize(
    ("problem", "part"),
    [(MemoryError(), MEMORY), *((RuntimeError(text), part) for text, part in SAID.items())],
)
def test_the_end_of_memory_and_of_the_gpus_patience_is_reported_in_one_line(
    llama: Path,
    computations: int,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
    part: str,
    metal: bool,
) -> None:
    """While the model is loaded, and while it decodes."""
    memory = {"memory_size": 8 << 30, "architecture": "applegpu_g15d"}
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "device_info", lambda device=None: memory if metal else {})
    for when in (1,) if metal else (1, computations):

        def fail(asked: int, when: int = when) -> None:
            if asked == when:
                raise problem

        with each_computation(fail):
            command("generate", PROMPT, "--model", llama, "--no-cost-cache", "-m", 2).refuses(part)


# Sources that cannot be read as they are: one line says what they are and what to do.


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (None, "no config.json"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": "telepathy"}', "telepathy"),
    ],
)
def test_a_bad_configuration_is_reported(
    t5: Path, tmp_path: Path, config: str | None, part: str
) -> None:
    broken = Path(shutil.copytree(t5, tmp_path / "broken"))
    (broken / "config.json").unlink()
    if config is not None:
        (broken / "config.json").write_text(config)
    command("generate", PROMPT, "--model", broken).refuses(part)


@pytest.mark.parametrize(
    ("config", "tensors", "part"),
    [
        ({}, {"lm_head.weight": None, "model.norm.weight": None}, "is missing (and 1 more)"),
        ({}, {"extra": (3,)}, "weight extra is not part of the model"),
        ({}, {"lm_head.weight": (64, 16)}, "weight lm_head.weight has shape (64, 16) where config"),
        ({"model_type": "no_such_model"}, {}, "model_type 'no_such_model' is not supported"),
        ({"hidden_size": None}, {}, "'hidden_size'"),
        ({"model_file": "evil.py"}, {}, "none is run"),
    ],
)
def test_weights_and_configurations_that_do_not_fit_are_named(
    llama: Path,
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, tuple[int, ...] | None],
    part: str,
) -> None:
    broken = Path(shutil.copytree(llama, tmp_path / "broken"))
    entries = {**json.loads((broken / "config.json").read_text()), **config}
    kept = {name: value for name, value in entries.items() if value is not None}
    (broken / "config.json").write_text(json.dumps(kept))
    weights: dict[str, Any] = dict(mx.load(str(llama / "model.safetensors")))
    weights |= {name: shape and mx.zeros(shape) for name, shape in tensors.items()}
    whole = {name: array for name, array in weights.items() if array is not None}
    mx.save_safetensors(str(broken / "model.safetensors"), whole, {"format": "mlx"})
    command("generate", PROMPT, "--model", broken).refuses(part)


def test_weights_that_are_cut_or_absent_are_named(llama: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(llama, tmp_path / "broken"))
    file, index = broken / "model.safetensors", broken / "model.safetensors.index.json"
    file.write_bytes(file.read_bytes()[:-100])
    command("generate", PROMPT, "--model", broken).refuses("model.safetensors is truncated")
    index.write_text(json.dumps({"weight_map": {"a": file.name, "b": "model-2.safetensors"}}))
    command("generate", PROMPT, "--model", broken).refuses("lacks the shard model-2.safetensors")
    index.unlink()
    file.unlink()
    command("generate", PROMPT, "--model", broken).refuses("has no .safetensors files")


PLACES = [("t5/umt5-tied", "model.safetensors"), ("t5-families/byt5", "pytorch_model.bin")]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_pointer_of_git_lfs_is_called_one(tmp_path: Path, name: str, place: str) -> None:
    source, out = Path(shutil.copytree(FIXTURES / name, tmp_path / "source")), tmp_path / "out"
    (source / place).write_bytes(POINTER)
    for words in (
        ("generate", "--model", source, "x"),
        ("inspect", source),
        ("convert", "--model", source, "--mlx-path", out),
    ):
        command(*words).refuses(f"{place} is a pointer of Git LFS", "git lfs pull")
    assert not out.exists()


@pytest.mark.parametrize("words", ["generate x --model", "convert --model", "inspect"])
def test_a_model_in_metas_own_layout_is_one_sentence(tmp_path: Path, words: str) -> None:
    for name in ("consolidated.00.pth", "params.json"):
        (tmp_path / name).write_bytes(b"{}")
    command(*words.split(), tmp_path).refuses("Meta's own layout", "Hugging Face's format")
