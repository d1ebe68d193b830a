"""Prompts for filling in the middle: the order of each family, and what is cut from a long one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlx_specdec.text.prompts import MARKS, infill_of
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.tokenizers import byte_level

QWEN = (*MARKS[0], "<|file_sep|>")


def marked(directory: Path, pieces: tuple[str, ...]) -> Path:
    """A tokenizer whose last tokens have been renamed to these special ones."""
    byte_level(directory)
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
    tokenizer = load_tokenizer(marked(tmp_path, marks), kind="decoder-only")
    infill = infill_of(tokenizer)
    assert infill is not None
    pieces = tokenizer.pieces
    ids = infill.prompt("a", "b", [("c.py", "d")])
    assert ids[0] == tokenizer.encode("")[0]
    found = [pieces[id] for id in ids if pieces[id] in marks]
    assert found == ([marks[1], marks[0]] if len(marks) == 2 else list(marks))
    head = tokenizer.decode(
        ids[: ids.index(infill.marks[1] if len(marks) == 2 else infill.marks[0])]
    )
    assert head == "+++++ c.py\nd\n"
    assert {infill.marks[0], infill.marks[1]} <= set(infill.ends)


def test_the_ends_of_sequences_end_a_middle(tmp_path: Path) -> None:
    directory = marked(tmp_path, (*MARKS[0], "<|endoftext|>", "<|im_end|>"))
    tokenizer = load_tokenizer(directory, kind="decoder-only")
    infill = infill_of(tokenizer)
    assert infill is not None
    pieces = infill.tokenizer.pieces
    assert {"<|endoftext|>", "<|im_end|>"} <= {pieces[id] for id in infill.ends}


def test_a_long_prompt_is_cut_around_the_cursor(tmp_path: Path) -> None:
    infill = infill_of(load_tokenizer(marked(tmp_path, QWEN), kind="decoder-only"))
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
