"""Filling in the middle: prompts of each family, both endpoints, and models that cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra server is not installed")

from starlette.testclient import TestClient

from mlx_specdec.engine.loading import load
from mlx_specdec.text.infill import MARKS, infill_of

from ..support.models import make_llama
from ..support.serving import COMPLETIONS, OPTIONS, client_of, ok, running

QWEN = (*MARKS[0], "<|file_sep|>")
BEFORE, AFTER = "def read_lines(file):\n    ", "\n    return lines"


def marked(directory: Path, pieces: tuple[str, ...]) -> Path:
    """A tiny model whose last tokens have been renamed to these special ones."""
    make_llama(directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    kept = sorted(vocabulary, key=vocabulary.__getitem__)[: len(vocabulary) - len(pieces)]
    content["model"]["vocab"] = {piece: vocabulary[piece] for piece in kept}
    content["model"]["merges"] = [
        each for each in content["model"]["merges"] if "".join(each) in content["model"]["vocab"]
    ]
    for at, piece in enumerate(pieces):
        added = {"id": len(kept) + at, "content": piece, "special": True, "single_word": False}
        added |= {"lstrip": False, "rstrip": False, "normalized": False}
        content["added_tokens"].append(added)
    file.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks[0])
def test_each_family_has_its_order(marks: tuple[str, str, str], tmp_path: Path) -> None:
    tokenizer = load(marked(tmp_path, tuple(filter(None, marks)))).tokenizer
    infill = infill_of(tokenizer)
    assert infill is not None
    pieces = tokenizer.pieces()
    ids = infill.prompt("a", "b", [("c.py", "d")])
    assert ids[0] == tokenizer.encode("")[0]
    found = [pieces[id] for id in ids if pieces[id] in marks]
    assert found == ([marks[1], marks[0]] if not marks[2] else list(marks))
    head = tokenizer.decode(ids[: ids.index(infill.marks[1] if not marks[2] else infill.marks[0])])
    assert head == "+++++ c.py\nd\n"
    assert {infill.marks[0], infill.marks[1]} <= set(infill.ends)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    directory = marked(tmp_path_factory.mktemp("infill"), QWEN)
    with running((directory, None), replace(OPTIONS, proposer="ngram", num_draft=4)) as engine:
        yield client_of(engine)


def test_both_endpoints_write_the_middle_and_the_same_plainly(client: TestClient) -> None:
    body = {"temperature": 0, "max_tokens": 20}
    whole = ok(client, COMPLETIONS, prompt=BEFORE, suffix=AFTER, **body)
    plain = ok(client, COMPLETIONS, prompt=BEFORE, suffix=AFTER, speculative=False, **body)
    text = whole["choices"][0]["text"]
    assert (
        text
        == plain["choices"][0]["text"]
        != ok(client, COMPLETIONS, prompt=BEFORE, **body)["choices"][0]["text"]
    )
    given = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 20, "temperature": 0}
    filled = ok(client, "/infill", **given)
    assert filled["content"] == text and filled["stop"] and "timings" in filled
    assert filled["tokens_evaluated"] == whole["usage"]["prompt_tokens"]
    answer = client.post("/infill", json={**given, "stream": True}).text
    events = [json.loads(each[6:]) for each in answer.split("\n\n") if each.startswith("data: {")]
    assert "".join(each["content"] for each in events) == text and events[-1]["stop"]
    chosen = ok(client, "/infill", **given, response_fields=["content", "timings/prompt_n"])
    assert list(chosen) == ["content", "timings/prompt_n"]
    extra = [{"filename": "a.py", "text": "lines = []"}]
    assert ok(client, "/infill", **given, input_extra=extra)["tokens_evaluated"] > len(BEFORE) / 4
    assert ok(client, "/infill", **{**given, "n_predict": 0})["content"] == ""


def test_what_cannot_be_filled_in_is_refused_by_name(client: TestClient, llama) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": [5, 6], "suffix": "x"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    assert client.post("/infill", json={"input_extra": [{"filename": "a"}]}).status_code == 400
    with running((llama[0], None)) as engine:
        other = client_of(engine)
        for path, name in ((COMPLETIONS, "suffix"), ("/infill", "input_suffix")):
            answer = other.post(path, json={"prompt": "x", name: "y"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name
