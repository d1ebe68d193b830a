"""Filling in the middle: prompts of each family, both endpoints, and models that cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from starlette.testclient import TestClient

from mlx_specdec.engine.loading import load
from mlx_specdec.serve.settings import Limits
from mlx_specdec.text import tokenizer as tokenizers
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


def test_the_ends_of_sequences_end_a_middle(tmp_path: Path) -> None:
    infill = infill_of(load(marked(tmp_path, (*MARKS[0], "<|endoftext|>", "<|im_end|>"))).tokenizer)
    assert infill is not None
    pieces = infill.tokenizer.pieces()
    assert {"<|endoftext|>", "<|im_end|>"} <= {pieces[id] for id in infill.ends}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    directory = marked(tmp_path_factory.mktemp("infill"), QWEN)
    with running((directory, None), replace(OPTIONS, proposer="ngram", num_draft=4)) as engine:
        yield client_of(engine, Limits(context=400))


def test_the_names_of_tokens_are_listed_once_for_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain = [], tokenizers._by_id

    def counted(vocabulary: Mapping[str, int], size: int) -> list[str | None]:
        made.append(size)
        return plain(vocabulary, size)

    monkeypatch.setattr(tokenizers, "_by_id", counted)
    directory = marked(tmp_path, QWEN)
    with running((directory, None), replace(OPTIONS, proposer="ngram", num_draft=4)) as engine:
        client = client_of(engine)
        for _ in range(2):
            ok(client, "/infill", input_prefix=BEFORE, input_suffix=AFTER, n_predict=2)
            ok(client, "/apply-template", messages=[{"role": "user", "content": "hi"}])
    assert len(made) == 1


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


class Writing:
    """A model that writes a text of given tokens, whatever its prompt."""

    why_not_batched = "it writes one text"

    def __init__(self, model: Any, text: Sequence[int]) -> None:
        self._model, self._text = model, text
        self._context: Any = None
        self._prompt = 0

    def reaching(self, length: int) -> Writing:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model if self._context is None else self._context, name)

    def open_batch(self, prompts: Sequence[Sequence[int]], cached: Any = ()) -> Writing:
        opened = Writing(self._model, self._text)
        opened._context, opened._prompt = self._model.open_batch(prompts, cached), len(prompts[0])
        return opened

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Any:
        [begin] = self._context.lengths
        scores = self._context.advance(tokens, proposed, taps)
        rows, size = scores.logits.shape[1:]
        first = begin + tokens.shape[1] - rows + 1 - self._prompt
        nexts = [
            self._text[at] if 0 <= at < len(self._text) else 5 for at in range(first, first + rows)
        ]
        return replace(scores, logits=1e4 * (mx.array(nexts)[:, None] == mx.arange(size))[None])


@pytest.mark.parametrize("family", [MARKS[0], MARKS[-1]], ids=["suffix last", "suffix first"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/infill"])
def test_a_middle_that_repeats_the_suffix_is_drafted_from_it(
    path: str, family: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    middle = "total = sum(each.size for each in files if each.name)"
    pair = load(marked(tmp_path, tuple(filter(None, family))))
    text = list(
        filter(lambda id: id not in pair.tokenizer.special_ids, pair.tokenizer.encode(middle))
    )
    writing = replace(pair, target=Writing(pair.target, text))
    monkeypatch.setattr("tests.support.serving.load", lambda *_: writing)
    options = replace(OPTIONS, proposer="ngram", num_draft=4)

    def accepted(suffix: str) -> int:
        """The accepted drafts of the middle, all of lookup's making."""
        before, after = (
            ("prompt", "suffix") if path == COMPLETIONS else ("input_prefix", "input_suffix")
        )
        body = {before: "x = 1\n", after: suffix, "temperature": 0, "max_tokens": len(text)}
        with running((tmp_path, None), options) as engine:
            answer = ok(client_of(engine), path, **body)
        assert (
            answer["choices"][0]["text"] if path == COMPLETIONS else answer["content"]
        ) == middle
        return answer["timings"]["draft_n_accepted"]

    assert accepted(f"\n{middle}\nreturn total") > len(text) / 2 > 4 * accepted("\nreturn 17\n")


def test_a_long_prompt_is_cut_around_the_cursor(client: TestClient, tmp_path: Path) -> None:
    infill = infill_of(load(marked(tmp_path, QWEN)).tokenizer)
    assert infill is not None
    prefix, suffix = (infill.marks[place] for place in (0, 1))

    def parts(ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        first, second = ids.index(prefix), ids.index(suffix)
        return ids[1:first], ids[first + 1 : second], ids[second + 1 : -1]

    files = [("a.py", " z" * 400)]
    for lengths in ((400, 0), (400, 400), (0, 400), (100, 9), (9, 100)):
        before, after = (" x" * length for length in lengths)
        whole = infill.prompt(before, after, files)
        all_files, all_head, all_tail = parts(whole)
        for room in (4, 60, 120, 121, 200):
            cut = infill.prompt(before, after, files, room)
            assert len(cut) <= room and cut[0] == whole[0]
            kept, head, tail = parts(cut)
            assert tail == all_tail[: len(tail)] and head == all_head[len(all_head) - len(head) :]
            assert kept == all_files[len(all_files) - len(kept) :]
            # Nothing is left unused but a step of the prefix.
            assert len(cut) > 0.85 * room - 4 or cut == whole
            assert len(tail) >= min(len(all_tail), room // 4 - 4)
    dropped = {
        len(infill.prompt(text, "")) - len(infill.prompt(text, "", room=200))
        for text in (" x" * (400 + count) for count in range(12))
    }
    assert len(dropped) <= 2, "the prefix begins elsewhere with every letter"
    filled = ok(client, "/infill", input_prefix=" x" * 400, input_suffix=" y" * 400, n_predict=5)
    assert filled["tokens_predicted"] <= 5 and filled["stop"]


def test_what_cannot_be_filled_in_is_refused_by_name(client: TestClient, llama) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": [5, 6], "suffix": "x"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    assert client.post("/infill", json={"input_extra": [{"filename": "a"}]}).status_code == 400
    with running((llama[0], None)) as engine:
        other = client_of(engine)
        for path, name in ((COMPLETIONS, "suffix"), ("/infill", "input_suffix")):
            answer = other.post(path, json={"prompt": "x", name: "y"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name
