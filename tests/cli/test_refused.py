"""Bad input: one line that says what is wrong, exit code 2, no traceback."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.models.mlx_lm import loading

from ..support import commands
from ..support.commands import Run, fails
from ..support.models import make_llama, make_t5

PROMPT = "Les pates"


@pytest.fixture
def broken(t5: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(t5, tmp_path / "broken"))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--delta", "1.5"), "delta must lie in [0, 1]"),
        (("--delta", "nan"), "delta"),
        (("--delta", "0.5", "--rule", "coupled"), "coupled has no lenience"),
        (("--top-p", "0"), "top-p"),
        (("--logit-bias", "many"), "ID=VALUE"),
        (("--proposer", "oracle"), "proposer"),
        (("--ngram-min", "0"), "ngram-min"),
        (("--top-k", "-1"), "top-k"),
        (("--min-p", "1.1"), "min-p"),
        (("--prefill-step-size", "0"), "prefill-step-size must be 1 or more"),
        (("--chat-template-config", "{"), "--chat-template-config must be a JSON object"),
        (("--system-prompt", "be brief", "--no-chat-template"), "leave out no-chat-template"),
        (("--xtc-probability", "1.1"), "xtc-probability must lie in [0, 1]"),
        (("--xtc-threshold", "0.6"), "xtc-threshold must lie in [0, 0.5]"),
        (("--num-draft", "65"), "num-draft"),
        (("--num-draft", "many"), "--num-draft"),
        (("--temperature", "-1"), "temperature"),
        (("--max-tokens", "-1"), "max-tokens"),
        (("--repetition-penalty", "0"), "repetition-penalty"),
        (("--stop", ""), "stop string"),
        (("--prompt", "again"), "more than one prompt"),
        (("--nonsense",), "--nonsense"),
        (("another argument",), "(another argument) - a prompt of several words needs quotes"),
        (("--temprature", 1), "No such option: --temprature (Possible options: --temperature)"),
        (("-m", "gpt2"), "for '--max-tokens' / '-m': it must be a whole number; --model names a"),
        (("--seed", "x"), "for '--seed': it must be a whole number (see --help)"),
        (("--temp", "x"), "for '--temperature' / '--temp': it must be a number (see --help)"),
        (("--regular-decode", "--num-draft", 3), "drafts nothing: leave out --num-draft"),
        (("--regular-decode", "--speculate", 3), "leave out --speculate"),
        (("--regular-decode", "--proposer", "ngram"), "leave out --proposer"),
        (("--proposer", "none", "--num-draft", 3), "--proposer none drafts nothing"),
        (("--speculate", 2, "--num-draft", 3), "are the same number"),
        (("--model", "py-llama"), "no directory py-llama: did you mean weights/py-llama?"),
        (("--model", "weights/py-lama"), "py-lama: did you mean weights/py-llama?"),
    ],
)
def test_wrong_flags_are_named_before_anything_is_loaded(run: Run, flags, part: str) -> None:
    fails(run("generate", PROMPT, "--model", "/nowhere", *flags), part)


def test_prompts_that_cannot_be_read_are_named(run: Run, t5: Path, tmp_path: Path) -> None:
    for prompt in ("", "  \n"):
        fails(run("generate", prompt, "--model", t5), "prompt is empty")
    fails(run("generate", "--model", t5), "no prompt")
    fails(run("generate", "--prompt-file", tmp_path / "no.txt", "--model", t5), "no.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    fails(run("generate", "--prompt-file", tmp_path / "latin.txt", "--model", t5), "UTF-8")


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
    fails(done, "glossary.txt", part)


def test_lookup_files_are_refused_where_nothing_would_search_them(run: Run, llama: Path) -> None:
    arguments = ("generate", PROMPT, "--model", llama, "--lookup-file", __file__)
    fails(run(*arguments, "--proposer", "draft", "--draft-model", llama), "--proposer ngram")
    fails(run(*arguments, "--proposer", "none"), "--proposer ngram")


def test_models_that_are_not_there_are_named(run: Run, t5: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fails(run("generate", PROMPT, "--model", "./nowhere"), "./nowhere")
    fails(run("generate", PROMPT, "--model", "no-such-model-anywhere"), "no-such-model-anywhere")
    fails(run("generate", PROMPT, "--model", t5, "--draft-model", "./none"), "./none")


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
def test_a_bad_configuration_is_reported(run: Run, broken: Path, config, part: str) -> None:
    (broken / "config.json").unlink()
    if config is not None:
        (broken / "config.json").write_text(config)
    fails(run("generate", PROMPT, "--model", broken), part)


def test_a_draft_with_another_vocabulary_is_refused_by_token(
    run: Run, t5: Path, tmp_path: Path
) -> None:
    other = make_t5(tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"▁midi,"', '"▁noon,"'), encoding="utf-8")
    done = run("generate", PROMPT, "--model", t5, "--draft-model", other)
    fails(done, "'▁midi,' in the target and '▁noon,' in the draft")


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (MemoryError(), commands.MEMORY),
        *((RuntimeError(message), said) for message, said in commands.SAID.items()),
    ],
)
def test_the_end_of_memory_and_of_the_gpus_patience_is_reported_in_one_line(
    run: Run, t5: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, said: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr("mlx_specdec.engine.generate.stream_generate", fail)
    fails(run("generate", PROMPT, "--model", t5), said)


@pytest.mark.parametrize("message", commands.SAID)
@pytest.mark.parametrize("on_cpu", [False, True])
def test_memory_that_ends_while_a_model_loads_is_no_missing_kernel(
    run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch, message: str, on_cpu: bool
) -> None:
    def fail(network: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(mx.metal, "is_available", lambda: not on_cpu)
    monkeypatch.setattr(loading, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(loading, "evaluate", fail)
    fails(run("generate", PROMPT, "--model", llama), commands.SAID[message])


def test_caches_that_a_model_cannot_have_are_refused(run: Run, t5: Path, llama: Path) -> None:
    fails(run("generate", PROMPT, "--model", t5, "--kv-bits", 8), "encoder-decoder")
    fails(run("generate", PROMPT, "--model", llama, "--kv-bits", 5), "kv-bits")
    fails(run("generate", PROMPT, "--model", llama, "--kv-bits", 8), "groups of 64")
    fails(run("generate", PROMPT, "--model", llama, "--max-kv-size", 0), "max-kv-size")


def test_what_a_model_does_not_have_is_refused(run: Run, t5: Path, llama: Path) -> None:
    for model in (t5, llama):
        arguments = ("generate", PROMPT, "--model", model)
        fails(run(*arguments, "--system-prompt", "be brief"), "this model has none")
        fails(run(*arguments, "--chat-template-config", '{"a": 1}'), "this model has none")
        fails(run(*arguments, "--extra-eos-token", "<|none|>"), "no token '<|none|>'")
    fails(
        run("generate", PROMPT, "--model", t5, "--adapter-path", llama),
        "encoder-decoder",
        "adapter-path",
    )
    fails(run("generate", PROMPT, "--model", llama, "--adapter-path", llama), "adapter_config.json")


def test_a_prompt_longer_than_the_model_can_take_is_refused(run: Run, tmp_path: Path) -> None:
    short = make_llama(tmp_path)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = 16
    (short / "config.json").write_text(json.dumps(config))
    fails(run("generate", "def f(x):\n" * 9, "--model", short), "16")


# Sources that cannot be read as they are: one line says what they are and what to do.


FIXTURES = Path(__file__).parents[1] / "fixtures"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"1" * 64 + b"\nsize 9\n"


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
    ],
)
def test_a_pointer_of_git_lfs_is_called_one(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = Path(shutil.copytree(FIXTURES / name, tmp_path / "source"))
    (source / place).write_bytes(POINTER)
    for said in each_command(run, source, tmp_path / "out"):
        assert f"{place} is a pointer of Git LFS" in said and "git lfs pull" in said


def test_a_byte_order_mark_before_a_configuration_is_passed_over(run: Run, tmp_path: Path) -> None:
    name = "t5/umt5-tied"
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


# Files that are no files, and links that lead away: refused by name, never waited for.


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("t5/umt5-tied", "config.json"),
        ("t5/umt5-tied", "model.safetensors"),
        ("t5-families/byt5", "pytorch_model.bin"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source, out = Path(shutil.copytree(FIXTURES / name, tmp_path / "source")), tmp_path / "out"
    (source / place).unlink()
    os.mkfifo(source / place)
    done = run("convert", "--model", source, "--mlx-path", out)
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1
    assert not out.exists()
    shown = run("inspect", source)
    assert shown.code == 0 or (shown.code == 2 and shown.err.count("\n") == 1)
