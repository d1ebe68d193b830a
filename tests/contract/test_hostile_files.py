"""Checkpoints by strangers: whatever they contain, an error names it at once."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from .support import ROOT, checkpoint, command

FIXTURES = ROOT / "tests" / "fixtures"

DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)
TEMPLATES = {
    "power": "{{ 10 ** (10 ** 8) }}",
    "product": "{{ 'a' * 10 ** 10 }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "method": "{{ 'a'.ljust(10 ** 10) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "percent": "{{ '%*d' % (10 ** 10, 1) }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "str.format with a width as an argument": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "doubling by ~": DOUBLING.replace("STEP", "ns.x ~ ns.x"),
    "doubling by +": DOUBLING.replace("STEP", "ns.x + ns.x"),
    "doubling by *": DOUBLING.replace("STEP", "ns.x * 2"),
    "doubling of a macro": (
        "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING.replace("STEP", "two(ns.x)")
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_would_never_end_is_refused(tmp_path: Path, name: str) -> None:
    model = checkpoint(tmp_path / "model", template=TEMPLATES[name])
    flags = ("--max-tokens", "1", "--temperature", "0")
    command("generate", "--model", model, *flags, "hello").refuses("the chat template cannot be")


TUPLE = b")" + b"".join(b"2\x86" for _ in range(60))
"""Operations that make a tuple of two tuples, each of which has two tuples, and so on."""
NESTED = {
    "key": b"}" + TUPLE + b"K\x01s.",
    "item of a set": b"\x8f(" + TUPLE + b"\x90.",
    "key of a storage": (
        b"}X\x01\x00\x00\x00a(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        + TUPLE
        + b"X\x03\x00\x00\x00cpuK\x01tQs."
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_pickle_whose_tuples_have_tuples_is_refused(tmp_path: Path, name: str) -> None:
    model = shutil.copytree(FIXTURES / "t5" / "tied-unscaled", tmp_path / "model")
    for file in model.glob("*.safetensors"):
        file.unlink()
    with zipfile.ZipFile(model / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + NESTED[name])
    command("generate", "--model", model, "hello").refuses("pytorch_model.bin", "damaged")


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("t5/tied-unscaled", "layer_norm_epsilon", [1]),
        ("t5/tied-unscaled", "decoder_start_token_id", "0"),
        ("t5/tied-unscaled", "decoder_start_token_id", 100_000),
        ("t5/tied-unscaled", "n_positions", "512"),
        ("t5/tied-unscaled", "model_type", ["t5"]),
        ("bart/bart", "activation_function", []),
        ("t5gemma2/grouped", "decoder.layer_types", 5),
    ],
)
def test_an_entry_of_a_wrong_type_is_refused(
    tmp_path: Path, name: str, entry: str, value: object
) -> None:
    model = shutil.copytree(FIXTURES / name, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    *outer, last = entry.split(".")
    place = config[outer[0]] if outer else config
    place[last] = value
    (model / "config.json").write_text(json.dumps(config))
    part = "config.json" if isinstance(value, int | list) else entry
    command("generate", "--model", model, "hello").refuses(str(model), part)


@pytest.mark.parametrize("name", ["llama-f32", "mixtral", "t5-f32"])
def test_a_gguf_file_with_a_wrong_number_of_layers_is_refused(tmp_path: Path, name: str) -> None:
    data = bytearray((FIXTURES / "gguf" / f"{name}.gguf").read_bytes())
    at = data.index(b".block_count") + len(b".block_count") + 4
    data[at + 2] += 1
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    command("generate", "--model", file, "hello").refuses("layers: download it again")
