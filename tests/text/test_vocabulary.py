"""Tokens of two vocabularies are shared by their texts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_specdec.errors import VocabularyError
from mlx_specdec.text.tokenizer import load_tokenizer
from mlx_specdec.text.vocabulary import shared_tokens

from ..support.tokenizers import byte_level, unigram


class Listed:
    """A tokenizer that is only its pieces."""

    def __init__(self, *pieces: str | None) -> None:
        self.pieces = list(pieces)
        self.size = len(pieces)


def test_tokens_are_shared_by_their_text_whatever_alphabet_they_are_written_in(
    tmp_path: Path,
) -> None:
    ours = load_tokenizer(byte_level(tmp_path / "a"), kind="decoder-only")
    theirs = load_tokenizer(unigram(tmp_path / "b"), kind="decoder-only")
    shared, fed = shared_tokens(ours, theirs, ours.size, theirs.size)
    pieces, others = ours.pieces, theirs.pieces
    assert len(shared) == len(fed) == ours.size
    assert others[shared[pieces.index("\u0120")]] == "\u2581"
    assert others[shared[pieces.index("r")]] == "r"
    assert others[shared[pieces.index("\u0100")]] == "<0x00>"
    assert shared[ours.eos_token_ids[0]] == theirs.eos_token_ids[0]
    assert shared[0] == -1
    assert all(0 <= id < theirs.size for id in fed)


def test_what_only_the_target_has_is_read_as_the_beginning_of_its_text(tmp_path: Path) -> None:
    plain = load_tokenizer(unigram(tmp_path / "a"), kind="encoder-decoder")
    more = load_tokenizer(unigram(tmp_path / "b", extra=("▁lines",)), kind="encoder-decoder")
    shared, fed = shared_tokens(more, plain, more.size, plain.size)
    assert shared[-1] == -1
    assert fed[-1] == plain.encode("lines")[0]


@pytest.mark.parametrize("make", [byte_level, unigram])
def test_white_space_that_only_a_byte_level_target_has_is_read_as_white_space(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    plain = load_tokenizer(byte_level(tmp_path / "a"), kind="decoder-only")

    class Longer(Listed):
        eos_token_ids = plain.eos_token_ids
        special_ids = plain.special_ids

    more = Longer(*plain.pieces, "\u0120" * 4, "\u010a" * 2)
    draft = load_tokenizer(make(tmp_path / "b"), kind="decoder-only")
    _, fed = shared_tokens(more, draft, more.size, draft.size)  # type: ignore[arg-type]
    spaces, line_ends = (draft.pieces[id] for id in fed[-2:])
    assert spaces in ("\u0120\u0120", "\u2581")
    assert line_ends in ("\u010a", "<0x0A>")


def test_vocabularies_with_hardly_a_token_in_common_are_refused() -> None:
    class Named(Listed):
        eos_token_ids = ()
        special_ids: frozenset[int] = frozenset()

    with pytest.raises(VocabularyError, match="share only 0 of 2 tokens"):
        shared_tokens(Named("a", "b"), Named("x", "y"), 2, 2)
