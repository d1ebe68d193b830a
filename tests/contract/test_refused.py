"""Wrong input is refused in one line that says what is wrong, and leaves nothing behind."""

import json
import os
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

FLAGS = [
    ("--delta 1.5", "delta must lie in [0, 1]"),
    ("--delta nan", "delta"),
    ("--delta 0.5 --rule coupled", "coupled has no lenience"),
    ("--top-p 0", "top-p"),
    ("--logit-bias many", "ID=VALUE"),
    ("--proposer oracle", "proposer"),
    ("--ngram-min 0", "ngram-min"),
    ("--top-k -1", "top-k"),
    ("--min-p 1.1", "min-p"),
    ("--prefill-step-size 0", "prefill-step-size must be 1 or more"),
    ("--chat-template-config {", "--chat-template-config must be a JSON object"),
    ("--system-prompt brief --no-chat-template", "leave out no-chat-template"),
    ("--xtc-probability 1.1", "xtc-probability must lie in [0, 1]"),
    ("--xtc-threshold 0.6", "xtc-threshold must lie in [0, 0.5]"),
    ("--num-draft 65", "num-draft"),
    ("--num-draft many", "--num-draft"),
    ("--temperature -1", "temperature"),
    ("--greedy --temperature 0.5", "leave out --temperature"),
    ("--max-tokens -1", "max-tokens"),
    ("--repetition-penalty 0", "repetition-penalty"),
    ("--stop=", "stop string"),
    ("--prompt again", "more than one prompt"),
    ("--nonsense", "--nonsense"),
    ("another", "(another) - a prompt of several words needs quotes"),
    ("--temprature 1", "No such option: --temprature (Possible options: --temperature)"),
    ("-m gpt2", "for '--max-tokens' / '-m': it must be a whole number; --model names a"),
    ("--seed x", "for '--seed': it must be a whole number (see --help)"),
    ("--temp x", "for '--temperature' / '--temp': it must be a number (see --help)"),
    ("--regular-decode --num-draft 3", "drafts nothing: leave out --num-draft"),
    ("--regular-decode --proposer ngram", "leave out --proposer"),
    ("--proposer none --num-draft 3", "--proposer none drafts nothing"),
    ("--model py-llama", "no directory py-llama: did you mean weights/py-llama?"),
    ("--model weights/py-lama", "py-lama: did you mean weights/py-llama?"),
    ("--json-schema asked:{", "json-schema is no JSON"),
    ("--json-schema asked:[1]", "json-schema must be a JSON object"),
    ('--json-schema asked:{"type":"strin"}', "Invalid type: strin"),
    ('--json-schema asked:{"$ref":"http://localhost/x"}', "does not fetch resources"),
    ("--json-schema asked:" + '{"items":' * 20000, "too many brackets in each other"),
    ("--json-schema asked:" + "1" * 300_000, "more than 262144 characters"),
    ("--json-schema binary", "is not UTF-8 text"),
    ("--json-schema none", "there is no file"),
    ("--grammar asked:", "grammar is empty"),
    ("--grammar asked:root::=x", "Rule 'x' not found"),
    ("--grammar asked:start:" + "(" * 9999, "too deeply nested"),
    ("--grammar .", "Is a directory"),
    ("--regex a(", "unclosed group"),
    ("--regex=", "regex is empty"),
    ("--regex \udcff", "half a character"),
    ('--regex a --grammar asked:start:"a"', "regex and grammar cannot"),
]
"""Flags of generate, and a part of the line. A word `asked:TEXT` is a file with this text."""


@pytest.mark.parametrize(("flags", "part"), FLAGS, ids=[flags[:40] for flags, _ in FLAGS])
def test_wrong_flags_are_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, part: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "weights").symlink_to(ROOT / "weights")
    (here / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(here)
    words = flags.split(" ")
    if (asked := words[-1].partition("asked:"))[1]:
        Path("asked").write_text(asked[2])
        words[-1] = "asked"
    # The model is not there, which would be said if the flags were right.
    command("generate", PROMPT, "--model", "./nowhere", *words).refuses(part)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a directory with files that hold no prompt, or no text to search."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "latin.txt": b"\xe9t\xe9",
        "empty.txt": b"",
        "program": b"\x7fELF\0\0",
        "blank.txt": b"\n \n",
        "text": b"def",
    }.items():
        Path(name).write_bytes(content)


@pytest.mark.parametrize(
    ("prompt", "flags", "parts"),
    [
        ([""], "--model t5", "prompt is empty"),
        (["  \n"], "--model t5", "prompt is empty"),
        ([], "--model t5", "no prompt"),
        ([], "--prompt-file no.txt --model t5", "no.txt"),
        ([], "--prompt-file latin.txt --model t5", "UTF-8"),
        (["\udcff"], "--model t5", "not UTF-8"),
        (["x"], "--model llama --lookup-file empty.txt", "empty.txt is empty"),
        (["x"], "--model llama --lookup-file program", "program|not UTF-8 text"),
        (["x"], "--model llama --lookup-file blank.txt", "blank.txt is empty"),
        (
            ["x"],
            "--model llama --draft-model llama --lookup-file text --proposer draft",
            "--proposer ngram",
        ),
        (["x"], "--model llama --lookup-file text --proposer none", "--proposer ngram"),
        (["x"], "--model ./nowhere", "./nowhere"),
        (["x"], "--model no-such-model-anywhere", "no-such-model-anywhere"),
        (["x"], "--model t5 --draft-model ./none", "./none"),
        (["x"], "--model t5 --kv-bits 8", "encoder-decoder"),
        (["x"], "--model llama --kv-bits 5", "kv-bits"),
        (["x"], "--model llama --kv-bits 8", "groups of 64"),
        (["x"], "--model llama --max-kv-size 0", "max-kv-size"),
        (["x"], "--model t5 --system-prompt brief", "this model has none"),
        (["x"], "--model llama --system-prompt brief", "this model has none"),
        (["x"], '--model llama --chat-template-config {"a":1}', "this model has none"),
        (["x"], '--model t5 --chat-template-config {"a":1}', "this model has none"),
        (["x"], "--model t5 --extra-eos-token <|none|>", "no token '<|none|>'"),
        (["x"], "--model llama --extra-eos-token <|none|>", "no token '<|none|>'"),
        (["x"], "--model t5 --adapter-path llama", "encoder-decoder|adapter-path"),
        (["x"], "--model llama --adapter-path llama", "adapter_config.json"),
    ],
)
@pytest.mark.usefixtures("files")
def test_input_that_a_model_cannot_take_is_named(
    prompt: list[str],
    flags: str,
    parts: str,
    t5: Path,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    places = {"t5": str(t5), "llama": str(llama)}
    done = command("generate", *prompt, *(places.get(word, word) for word in flags.split()))
    done.refuses(*parts.split("|"))


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


def test_a_prompt_beyond_the_memory_is_refused_before_it_is_read(
    t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 20 million tokens are for any machine; of a batch one line is an error."""
    pages = ((t5 / "model.safetensors").stat().st_size + 50_000_000) // 4096
    sizes = {"SC_PHYS_PAGES": pages, "SC_PAGESIZE": 4096}
    monkeypatch.setattr(os, "sysconf", lambda name, real=os.sysconf: sizes.get(name) or real(name))
    long = "Les pates, " * 20_000
    command("generate", long, "--model", t5).refuses(
        "the prompt has",
        "reading the prompt takes about",
        f"models may take {0.9 * pages * 4096 / 1e6:.1f} MB on this machine: shorten it",
    )
    file, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    file.write_text(f"les pates\n{long}\n")
    assert command("batch", file, "-o", out, "--model", t5, "-m", 3).code == 1
    first, second = map(json.loads, out.read_text().splitlines())
    assert "text" in first and "shorten it" in second["error"]


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


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "place"), [(PLACES[0][0], "config.json"), *PLACES])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, name: str, place: str
) -> None:
    source, out = Path(shutil.copytree(FIXTURES / name, tmp_path / "source")), tmp_path / "out"
    (source / place).unlink()
    os.mkfifo(source / place)
    command("convert", "--model", source, "--mlx-path", out).refuses()
    assert not out.exists()
    shown = command("inspect", source)
    assert shown.code == 0 or (shown.code == 2 and shown.err.count("\n") == 1)


def test_a_byte_order_mark_before_a_configuration_is_passed_over(t5: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(t5, tmp_path / "source")), tmp_path / "out"
    config = (source / "config.json").read_bytes()
    (source / "config.json").write_bytes(b"\xef\xbb\xbf" + config)
    assert command("convert", "--model", source, "--mlx-path", out).code == 0
    assert (out / "config.json").read_bytes()[:1] == b"{"
    words = ("generate", PROMPT, "-m", 3, "--quiet", "--model")
    assert command(*words, source) == command(*words, t5)
