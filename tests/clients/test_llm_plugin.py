"""The plugin for llm: in this process with models of the disk, and on llm's command line."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("llm", reason="the extra llm is not installed")

import llm

from mlx_specdec import Options, generate, load

from ..contract.support import ROOT
from ..support.tooled import make_tooled

PYTHON, DRAFT = "weights/py-llama", "weights/py-llama-draft"


def model(name: str) -> llm.Model:
    """Return a model of the plugin by its name."""
    entry = metadata.EntryPoint("mlx-specdec", "mlx_specdec.llm_plugin", "llm")
    found: dict[str, llm.Model] = {}
    entry.load().register_models(lambda one: found.update({one.model_id: one}))
    return found[f"mlx-specdec/{name}"]


def test_a_streamed_text_is_that_of_the_library_with_the_same_options() -> None:
    settings = {"max_tokens": 40, "temperature": 0.7, "top_k": 20, "seed": 5}
    prompt = "def read_lines(path):\n"
    response = model("py-llama").prompt(prompt, **settings, draft_model=DRAFT)
    pieces = list(response)
    wanted = generate(load(PYTHON, DRAFT), prompt, Options(**settings))
    assert "".join(pieces) == wanted.text and len(pieces) > 3
    usage = response.usage()
    assert (usage.input, usage.output) == (wanted.labels.prompt_tokens, len(wanted.tokens))
    assert response.response_json["finish_reason"] == wanted.finish_reason
    assert response.response_json["drafted"] > 0
    assert model("py-llama").prompt(prompt, **settings, stream=False).text() == wanted.text


def test_a_conversation_goes_on_with_a_model_that_is_loaded_once(tmp_path: Path) -> None:
    directory = str(make_tooled(tmp_path / "spoken"))
    spoken = type(model("py-llama"))(directory)
    conversation = spoken.conversation()
    settings = {"max_tokens": 12, "temperature": 0.9, "seed": 1}
    first = conversation.prompt("Who?", system="Be brief.", **settings).text()
    second = conversation.prompt("And?", **settings).text()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And?"},
    ]
    pair = load(directory)
    for text, history in ((first, messages[:2]), (second, messages)):
        assert text == generate(pair, history, Options(**settings)).text
    shutil.rmtree(directory)
    assert spoken.prompt("Who?", system="Be brief.", **settings).text() == first


def test_llm_finds_the_models_by_the_entry_point(tmp_path: Path) -> None:
    site = tmp_path / "site"
    if not metadata.entry_points(group="llm", value="mlx_specdec.llm_plugin"):
        # An installation from before the entry point does not state it yet.
        stated = site / "mlx_specdec_plugin-0.dist-info"
        stated.mkdir(parents=True)
        (stated / "METADATA").write_text("Metadata-Version: 2.1\nName: p\nVersion: 0\n")
        entry = "[llm]\nmlx-specdec = mlx_specdec.llm_plugin\n"
        (stated / "entry_points.txt").write_text(entry)
    path = os.pathsep.join(filter(None, (str(ROOT), str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "PYTHONPATH": path}

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    listed = ask("models")
    assert "MLX: mlx-specdec/t5-enfr\n" in listed and "dspark" not in listed
    ask_for = ("-m", "mlx-specdec/t5-enfr", "Where is the station?")
    assert "gare" in ask(*ask_for, "-o", "temperature", "0", "-o", "draft_model", "auto")
    assert json.loads(ask("logs", "--json"))[0]["model"] == "mlx-specdec/t5-enfr"
