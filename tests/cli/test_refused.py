"""Bad input: one line that says what is wrong, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ..support.commands import Outcome, Run, told
from ..support.models import make_llama, make_t5

PROMPT = "Les pates"


@pytest.fixture
def broken(t5: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(t5, tmp_path / "broken"))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--delta", "1.5"), "delta must lie in [0, 1]"),
        (("--delta", "-0.1"), "delta"),
        (("--delta", "nan"), "delta"),
        (("--delta", "0.5", "--rule", "coupled"), "coupled has no lenience"),
        (("--delta", "0.5", "--rule", "block"), "block has no lenience"),
        (("--top-p", "0"), "top-p"),
        (("--rule", "typical", "--delta", "0.1"), "typical has no lenience"),
        (("--posterior-alpha", "1"), "posterior-alpha"),
        (("--posterior-threshold", "0"), "posterior-threshold"),
        (("--logit-bias", "many"), "ID=VALUE"),
        (("--proposer", "oracle"), "proposer"),
        (("--ngram-min", "0"), "ngram-min"),
        (("--ngram-choice", "best"), "ngram-choice"),
        (("--speculate", "-2"), "num-draft"),
        (("--logit-bias", "-3=1"), "logit-bias"),
        (("--presence-penalty", "nan"), "presence-penalty"),
        (("--top-p", "1.2"), "top-p"),
        (("--top-k", "-1"), "top-k"),
        (("--min-p", "1"), "min-p"),
        (("--prefill-step-size", "0"), "prefill-step-size must be 1 or more"),
        (("--chat-template-config", "{"), "--chat-template-config must be a JSON object"),
        (("--chat-template-config", "[1]"), "--chat-template-config must be a JSON object"),
        (("--system-prompt", "be brief", "--no-chat-template"), "leave out no-chat-template"),
        (("--xtc-probability", "1.1"), "xtc-probability must lie in [0, 1]"),
        (("--xtc-probability", "nan"), "xtc-probability"),
        (("--xtc-threshold", "0.6"), "xtc-threshold must lie in [0, 0.5]"),
        (("--xtc-threshold", "-0.1"), "xtc-threshold"),
        (("--num-draft", "-1"), "num-draft"),
        (("--num-draft", "65"), "num-draft"),
        (("--num-draft", "many"), "--num-draft"),
        (("--temperature", "-1"), "temperature"),
        (("--temp", "inf"), "temperature"),
        (("--max-tokens", "-1"), "max-tokens"),
        (("--repetition-penalty", "0"), "repetition-penalty"),
        (("--rule", "typical-ish"), "rule"),
        (("--stop", ""), "stop string"),
        (("--prompt", "again"), "more than one prompt"),
        (("--nonsense",), "--nonsense"),
        (("another argument",), "another argument"),
    ],
)
def test_wrong_flags_are_named_before_anything_is_loaded(run: Run, flags, part: str) -> None:
    told(run("generate", PROMPT, "--model", "/nowhere", *flags), part)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(run: Run, t5: Path, prompt: str) -> None:
    told(run("generate", prompt, "--model", t5), "prompt is empty")


def test_a_model_without_a_prompt_is_refused(run: Run, t5: Path) -> None:
    told(run("generate", "--model", t5), "no prompt")


def test_prompt_files_that_cannot_be_read_are_named(run: Run, t5: Path, tmp_path: Path) -> None:
    told(run("generate", "--prompt-file", tmp_path / "no.txt", "--model", t5), "no.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    told(run("generate", "--prompt-file", tmp_path / "latin.txt", "--model", t5), "UTF-8")


def test_a_prompt_without_end_is_refused(run: Run, t5: Path) -> None:
    told(run("generate", "--prompt-file", "/dev/zero", "--model", t5), "more than 33554432")


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"", "is empty"), (b"\x7fELF\0\0", "not UTF-8 text"), (b"\n \n", "is empty")],
)
def test_lookup_files_that_hold_no_text_are_named(
    run: Run, llama: Path, tmp_path: Path, content: bytes, part: str
) -> None:
    file = tmp_path / "glossary.txt"
    file.write_bytes(content)
    done = run("generate", PROMPT, "--model", llama, "--lookup-file", file)
    told(done, "glossary.txt", part)


def test_lookup_files_are_refused_where_nothing_would_search_them(run: Run, llama: Path) -> None:
    asked = ("generate", PROMPT, "--model", llama, "--lookup-file", __file__)
    told(run(*asked, "--proposer", "draft", "--draft-model", llama), "--proposer ngram")
    told(run(*asked, "--proposer", "none"), "--proposer ngram")


def test_models_that_are_not_there_are_named(run: Run, t5: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told(run("generate", PROMPT, "--model", "./nowhere"), "./nowhere")
    told(run("generate", PROMPT, "--model", "no-such-model-anywhere"), "no-such-model-anywhere")
    told(run("generate", PROMPT, "--model", t5, "--draft-model", "./none"), "./none")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (None, "no config.json"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": "telepathy"}', "telepathy"),
    ],
)
def test_a_bad_configuration_is_told(run: Run, broken: Path, config, part: str) -> None:
    (broken / "config.json").unlink()
    if config is not None:
        (broken / "config.json").write_text(config)
    told(run("generate", PROMPT, "--model", broken), part)


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_or_misshapen_tensor_is_named(run: Run, broken: Path, missing: bool) -> None:
    file, name = broken / "model.safetensors", "decoder.final_layer_norm.weight"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    weights[name] = mx.zeros((3,))
    if missing:
        del weights[name]
    mx.save_safetensors(str(file), weights)
    told(run("generate", PROMPT, "--model", broken), name)


def test_a_draft_with_another_vocabulary_is_refused_by_token(
    run: Run, t5: Path, tmp_path: Path
) -> None:
    other = make_t5(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"▁midi,"', '"▁noon,"'), encoding="utf-8")
    done = run("generate", PROMPT, "--model", t5, "--draft-model", other)
    told(done, "'▁midi,' in the target and '▁noon,' in the draft")


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        RuntimeError("[malloc] Unable to allocate 4398046511104 bytes."),
        RuntimeError("[metal::malloc] Attempting to allocate 4398046511104 bytes"),
    ],
)
def test_the_end_of_memory_is_told_in_one_line(
    run: Run, t5: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr("mlx_specdec.engine.generate.stream_generate", fail)
    told(run("generate", PROMPT, "--model", t5), "the memory does not suffice")


def test_caches_that_a_model_cannot_have_are_refused(run: Run, t5: Path, llama: Path) -> None:
    told(run("generate", PROMPT, "--model", t5, "--kv-bits", 8), "T5")
    told(run("generate", PROMPT, "--model", llama, "--kv-bits", 5), "kv-bits")
    told(run("generate", PROMPT, "--model", llama, "--kv-bits", 8), "groups of 64")
    told(run("generate", PROMPT, "--model", llama, "--max-kv-size", 0), "max-kv-size")


def test_what_a_model_does_not_have_is_refused(run: Run, t5: Path, llama: Path) -> None:
    for model in (t5, llama):
        asked = ("generate", PROMPT, "--model", model)
        told(run(*asked, "--system-prompt", "be brief"), "this model has none")
        told(run(*asked, "--chat-template-config", '{"a": 1}'), "this model has none")
        told(run(*asked, "--extra-eos-token", "<|none|>"), "no token '<|none|>'")
    told(run("generate", PROMPT, "--model", t5, "--adapter-path", llama), "T5", "adapter-path")
    told(run("generate", PROMPT, "--model", llama, "--adapter-path", llama), "no adapter of mlx-lm")


def test_a_prompt_longer_than_the_model_can_take_is_refused(run: Run, tmp_path: Path) -> None:
    short = make_llama(tmp_path)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = 16
    (short / "config.json").write_text(json.dumps(config))
    told(run("generate", "def f(x):\n" * 9, "--model", short), "16")


# Sources that cannot be read as they are: one line says what they are and what to do.


FIXTURES = Path(__file__).parents[1] / "fixtures"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"1" * 64 + b"\nsize 9\n"
NOBODY = 65534


def each_command(run: Run, source: Path, out: Path) -> Iterator[str]:
    """What generate, convert and inspect say, one line each."""
    for command in (("generate", "--model", source, "x"), ("inspect", source)):
        done = run(*command)
        assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1
        yield done.err
    done = run("convert", "--model", source, "--mlx-path", out)
    assert done.code == 2 and done.err.count("\n") == 1 and not out.exists()
    yield done.err


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("t5/umt5-tied", "model.safetensors"),
        ("t5-families/byt5", "pytorch_model.bin"),
        ("meta/llama2", "consolidated.00.pth"),
    ],
)
def test_a_pointer_of_git_lfs_is_called_one(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = Path(shutil.copytree(FIXTURES / name, tmp_path / "source"))
    (source / place).write_bytes(POINTER)
    for said in each_command(run, source, tmp_path / "out"):
        assert f"{place} is a pointer of Git LFS" in said and "git lfs pull" in said


@pytest.mark.parametrize("name", ["t5/umt5-tied", "meta/llama3"])
def test_a_byte_order_mark_before_a_configuration_is_passed_over(
    run: Run, tmp_path: Path, name: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    assert run("convert", "--model", FIXTURES / name, "--mlx-path", source).code == 0
    config = (source / "config.json").read_bytes()
    (source / "config.json").write_bytes(b"\xef\xbb\xbf" + config)
    assert run("convert", "--model", source, "--mlx-path", out).code == 0
    assert (out / "config.json").read_bytes()[:1] == b"{"
    if (source / "tokenizer.json").is_file():
        command = ("generate", "x", "--max-tokens", "3", "--temp", "0", "--model")
        marked, plain = run(*command, source), run(*command, out)
        assert marked.code == 0 and marked.out == plain.out


@pytest.fixture
def closed() -> Iterator[Path]:
    """A model in a directory without permissions, in one that everybody may enter."""
    outer = Path(tempfile.mkdtemp())
    outer.chmod(0o755)
    source = Path(shutil.copytree(FIXTURES / "t5" / "umt5-tied", outer / "source"))
    try:
        yield source
    finally:
        source.chmod(0o755)
        shutil.rmtree(outer)


@pytest.mark.parametrize("mode", [0o000, 0o600, 0o300])
def test_a_directory_without_permission_is_one_line(run: Run, closed: Path, mode: int) -> None:
    for _ in each_command(run, closed / "none", closed.parent / "out"):
        pass  # what is imported late is imported now, while that may be read
    closed.chmod(mode)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        for said in each_command(run, closed, closed.parent / "out"):
            assert f"{closed} may not be read" in said
    finally:
        if root:
            os.seteuid(0)


# Files that are no files, and links that lead away: refused by name, never waited for.


PLACES = [
    ("t5/umt5-tied", "config.json"),
    ("t5/umt5-tied", "model.safetensors"),
    ("t5-families/byt5", "pytorch_model.bin"),
    ("t5-families/flan-ul2", "model.safetensors.index.json"),
    ("t5-families/flan-ul2", "model-00002-of-00003.safetensors"),
    ("meta/llama2", "params.json"),
    ("meta/llama2", "consolidated.00.pth"),
    ("meta/llama2", "consolidated.01.pth"),
]


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, tmp_path / "source"))


def check(run: Run, source: Path, out: Path) -> None:
    """Both commands end with one line, or inspect with tables."""
    done = run("convert", "--model", source, "--mlx-path", out)
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1
    assert not out.exists()
    shown = run("inspect", source)
    assert shown.code == 0 or (shown.code == 2 and shown.err.count("\n") == 1)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = copied(name, tmp_path)
    (source / place).unlink()
    os.mkfifo(source / place)
    check(run, source, tmp_path / "out")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "name", ["model.gguf", "stories.bin", "x.safetensors", "x.pt", "x.pth", "consolidated.00.pth"]
)
def test_a_pipe_given_by_name_is_not_waited_for(run: Run, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for source in (tmp_path / name, tmp_path):
        check(run, source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("meta/llama2", "consolidated.01.pth"),
        ("meta/llama3", "tokenizer.model"),
        ("t5-families/flan-ul2", "model-00002-of-00003.safetensors"),
    ],
)
def test_links_in_a_directory_are_not_followed_out(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = copied(name, tmp_path)
    (source / place).rename(tmp_path / "elsewhere")
    (source / place).symlink_to(tmp_path / "elsewhere")
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert done.code == 2 and "link out of its directory" in done.err and place in done.err


# config.json with numbers that no model has: one line, at once, whoever reads it. One case a
# message; `tests/checkpoints/test_configuration.py` has the values.


def changed(source: Path, directory: Path, key: str, value: Any) -> Path:
    """A copy of a model whose config.json says something else."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    text = json.dumps({**config, key: value})
    # Python writes no number of so many digits, and reads none.
    text = text.replace('"10 ** 4000"', "1" + "0" * 4000)
    (directory / "config.json").write_text(text)
    return directory


def is_told(outcome: Outcome, *parts: str) -> bool:
    """One short line, and nothing else."""
    line = outcome.err
    whole = line.startswith("error: ") and line.count("\n") == 1 and len(line) < 500
    return outcome.code == 2 and outcome.out == "" and whole and all(p in line for p in parts)


@pytest.mark.parametrize(
    ("family", "key", "value", "says"),
    [
        ("llama", "vocab_size", 0, "vocab_size 0: need a whole number"),
        ("llama", "hidden_size", "10 ** 4000", "of more than 40 digits"),
        ("llama", "hidden_size", 10**30, "hidden_size"),
        ("llama", "hidden_size", "4", "does not describe a model"),
        ("llama", "vocab_size", None, "does not describe a model"),
        ("llama", "num_hidden_layers", 10**9, "asks for 1000000000 layers"),
        ("llama", "vocab_size", 1000, "has shape"),
        ("llama", "rope_theta", float("nan"), "rope_theta nan: need a number above 0"),
        ("t5", "d_model", -1, "needs d_model, a whole number above 0, not -1"),
        ("t5", "d_model", "10 ** 4000", "not one so large"),
        ("t5", "num_decoder_layers", 10**9, "asks for 1000000000 layers"),
        ("t5", "num_layers", [], "needs num_layers"),
        ("t5", "d_model", 1000, "where config.json asks for"),
    ],
)
def test_sizes_that_cannot_be(
    run: Run,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    family: str,
    key: str,
    value: Any,
    says: str,
) -> None:
    source = changed(request.getfixturevalue(family), tmp_path / "m", key, value)
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert is_told(done, says), done.err
    assert not (tmp_path / "out").exists()
    shown = run("inspect", source)
    assert shown.code == 0 and "Not convertible" in shown.out
    assert is_told(run("generate", "x", "-m", 1, "--model", source))
