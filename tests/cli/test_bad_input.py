"""Bad input: one line that says what is wrong, exit code 2, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from ..support.commands import Run, told
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


def test_lookup_files_that_are_not_there_are_named_before_anything_is_loaded(
    run: Run, tmp_path: Path
) -> None:
    asked = ("generate", PROMPT, "--model", "/nowhere", "--lookup-file")
    told(run(*asked, tmp_path / "no.txt"), "no.txt", "--lookup-file")
    told(run(*asked, tmp_path), "directory", "--lookup-file")


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
    "flag", ["--model", "--draft-model", "--prompt-file", "--lookup-file", "--adapter-path"]
)
def test_names_that_no_file_can_have_are_told(run: Run, llama: Path, flag: str) -> None:
    asked = {"--model": str(llama), flag: "x" * 5000}
    prompt = () if flag == "--prompt-file" else (PROMPT,)
    done = run("generate", *prompt, *(word for pair in asked.items() for word in pair))
    told(done, "long" if flag != "--lookup-file" else "--lookup-file")


def test_a_file_in_place_of_a_directory_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    told(run("generate", PROMPT, "--model", tmp_path / "model"), "is a file")


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


def test_truncated_weights_are_told(run: Run, broken: Path) -> None:
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    told(run("generate", PROMPT, "--model", broken), "truncated", "model.safetensors")


def test_a_missing_shard_is_named(run: Run, broken: Path) -> None:
    index = {"weight_map": {"shared.weight": "model-00002-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    told(run("generate", PROMPT, "--model", broken), "model-00002-of-00002.safetensors")


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


def test_a_draft_of_another_kind_is_refused(run: Run, t5: Path, llama: Path) -> None:
    told(run("generate", PROMPT, "--model", t5, "--draft-model", llama), "decoder-only")


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
