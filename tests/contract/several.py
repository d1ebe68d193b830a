"""One server of several small models, and what each of them writes alone."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from mlx_specdec import Options, Result, generate, load

from .learned import learned
from .support import ROOT, Server, checkpoint, moved, served

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TEMPLATES: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("templates.toml").read_text(encoding="utf-8")
)
CALL = {"name": "keep", "arguments": {"name": "ab", "age": 7}}
ANSWERS = {
    "[answer]": "Nobody was there.",
    "<think>": "Hm, who could that be?</think>It must have been the wind.",
    "[call]": '<tool_call>\n{"name": "keep", "arguments": {"name": "ab", "age": 7}}\n</tool_call>',
}
"""What the chat model writes after the end of its prompt: it answers, thinks, or calls a tool."""
TEMPLATES = {name: _TEMPLATES[name] for name in ("in-place", "hoisting", "raising", "forgetful")}
"""Chat templates by the names of models: they keep later system messages where they are, move them
to the beginning, or refuse them, and one leaves out thoughts before the newest question."""
PROMPT = "def read_lines"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def write_translator(directory: Path) -> None:
    """Write a T5 whose encoder has layers without an effect, so that its output is the normalized
    embeddings of the tokens."""
    shutil.copytree(ROOT / "weights" / "t5-enfr-draft", directory)
    file = str(directory / "model.safetensors")
    weights: Any = mx.load(file)
    for name, array in weights.items():
        if re.fullmatch(r"encoder\.block\..*\.w?o\.(scales|biases)", name):
            weights[name] = mx.zeros_like(array)
    mx.save_safetensors(file, weights, {"format": "mlx"})


@cache
def completion(model: Path, ids: tuple[int, ...], settings: tuple[tuple[str, Any], ...]) -> Result:
    return generate(loaded(model), list(ids), Options(**dict(settings)))


@cache
def loaded(model: Path) -> Any:
    return load(model)


@dataclass(frozen=True)
class Several:
    """The server, and the directory with its models."""

    server: Server
    directory: Path

    def ids(self, text: str, model: str = "tiny") -> list[int]:
        """Return the token ids of a prompt."""
        file = self.directory / model / "tokenizer.json"
        return list(Tokenizer.from_file(str(file)).encode(text).ids)

    def alone(self, text: str | list[int], model: str = "tiny", **settings: Any) -> str:
        """Return what a model writes after a prompt by plain decoding in this process."""
        ids = self.ids(text, model) if isinstance(text, str) else text
        options = {"max_tokens": 24, "regular": True, "cost_cache": False, **settings}
        return completion(self.directory / model, tuple(ids), tuple(options.items())).text


@contextmanager
def serve_several(directory: Path) -> Iterator[Several]:
    """Write the models into a directory, and serve them."""
    tiny = checkpoint(directory / "tiny")
    draft = moved(tiny, directory / "tiny-draft")
    learned(directory / "chat", ANSWERS, _TEMPLATES["chat"], tokens=MARKS)
    write_translator(directory / "translator")
    # One table of flags for each model.
    drafting = {"draft-model": str(draft), "num-draft": 2}
    tables: dict[str, dict[str, object]] = {
        "tiny": {**drafting, "aliases": ["my/tiny"]},
        "counted": {**drafting, "model": str(tiny)},
        "chat": {},
        "translator": {"dtype": "float32"},
        "short": {"model": str(tiny), "max-model-len": 64},
        "chunks": {"model": str(tiny), "prefill-step-size": 8},
        "random": {"model": str(tiny), "temperature": 1.0, "seed": 3},
    }
    for name, template in TEMPLATES.items():
        shutil.copytree(tiny, directory / name)
        settings = directory / name / "tokenizer_config.json"
        changed = {**json.loads(settings.read_text()), "chat_template": template}
        settings.write_text(json.dumps(changed))
        tables[name] = {}
    lines = []
    for name, table in tables.items():
        entries = {"model": str(directory / name), "max-tokens": 24, **table}.items()
        lines += [f"[{name}]", *(f"{flag} = {json.dumps(value)}" for flag, value in entries)]
    preset = directory / "models.toml"
    preset.write_text("\n".join(lines))
    flags = ("--models-preset", preset, "--no-cost-cache", "--batch-size", 4)
    with served(*flags) as server:
        yield Several(server, directory)
