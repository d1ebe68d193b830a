"""Which tokens a constraint allows, compared with all texts that a pattern matches."""

import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.core.constraint import Alphabet, Constraint, Masks
from mlx_specdec.core.distribution import Distribution
from mlx_specdec.core.grammar import compiled, with_stack
from mlx_specdec.core.options import Options
from mlx_specdec.errors import OptionError

from ..support.letters import alphabet, regex
from ..support.nothing import NO_DRAFT

PIECES = ("<end>", "a", "b", "c", "ab", "bca", "<other end>")
ENDS = (0, 6)
TEXT = range(1, 6)
PATTERNS = [
    "[ab]+c?",
    "(ab|b)*a",
    "a{2,4}|bc",
    "(a|ab)(c|bca)?",
    "[abc]*",
    "b(ca)*",
    "abca",
    "a*",
    "ab(d|c)a?",
    "abdc|a",
]
"""No token has a d."""
LONGEST = 4


def begun(
    pattern: str, pieces: tuple[str, ...] = PIECES, ends: tuple[int, ...] = ENDS
) -> Constraint:
    return alphabet(pieces).constraint(regex(pattern), ends)


def ids(row: Masks) -> set[int]:
    return set(np.flatnonzero(row).tolist())


def spell(tokens: tuple[int, ...]) -> str:
    return "".join(PIECES[token] for token in tokens)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_allow_what_some_text_goes_on_with(pattern: str) -> None:
    words = (itertools.product("abcd", repeat=n) for n in range(LONGEST + 4))
    texts = {text for text in map("".join, itertools.chain(*words)) if re.fullmatch(pattern, text)}
    prefixes = {text[:end] for text in texts for end in range(len(text) + 1)}
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        tokens = waiting.pop()
        constraint = begun(pattern)
        assert constraint.take(tokens) == len(tokens)
        allowed, text = ids(constraint.masks([])[0]), spell(tokens)
        possible = {id for id in TEXT if text + PIECES[id] in prefixes}
        if constraint.stuck:
            assert not possible and text not in texts
            continue
        ends = {*ENDS} if text in texts else set()
        assert allowed & {*ENDS} == ends, text
        # Text that the grammar determines is written in canonical tokens.
        assert allowed - ends == possible or (
            len(allowed) == 1 and allowed < possible and constraint.forced()[:1] == [*allowed]
        )
        waiting += [(*tokens, id) for id in allowed - ends if len(text + PIECES[id]) <= LONGEST]


drafts = st.lists(st.integers(0, len(PIECES) - 1), max_size=6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(PATTERNS), st.integers(0, 2**30), st.lists(drafts, max_size=5))
def test_only_what_is_taken_moves_a_constraint(
    pattern: str, seed: int, looks: list[list[int]]
) -> None:
    dice, constraint, taken = np.random.default_rng(seed), begun(pattern), []
    for draft in looks:
        constraint.verifiable(draft)
        rows = constraint.masks(draft)
        constraint.forced()
        constraint.masks(draft[::-1])
        untouched = begun(pattern)
        assert untouched.take(taken) == len(taken)
        assert constraint.masks([]).tolist() == untouched.masks([]).tolist()
        assert constraint.forced() == untouched.forced()
        for place, token in enumerate(draft):
            assert ids(rows[place]) == ids(untouched.masks([])[0])
            if untouched.stuck or token in ENDS or token not in ids(rows[place]):
                # No later row is restricted.
                assert rows[place + 1 :].all()
                break
            assert untouched.take([token]) == 1
        allowed = sorted(ids(constraint.masks([])[0]))
        if constraint.stuck:
            break
        token = int(dice.choice(allowed))
        assert constraint.take([token]) == 1
        taken.append(token)
        if token in ENDS:
            break


def test_where_a_vocabulary_has_no_token_the_constraint_is_stuck() -> None:
    """Also where a draft led there, which leaves the constraint as it was."""
    constraint = begun("aax|aac")
    assert constraint.masks([1, 1]).shape == (3, len(PIECES))
    assert not constraint.stuck
    constraint = begun("(ab|c)x|bc")
    rows = constraint.masks([4])
    assert constraint.stuck and rows[1].all()
    assert ids(begun("(ab|c)x|bc").masks([])[0]) == ids(constraint.masks([])[0])
    assert not constraint.stuck
    assert constraint.take([4]) == 1
    constraint.masks([])
    assert constraint.stuck
    assert constraint.take([1]) < 1


class Prefixed:
    """Tokens begin with the space before a word, and every text is given one, as T5's is."""

    pieces = ("<end>", " ", " a", "a", " b", "b", "x")

    def encode(self, text: str) -> list[int]:
        text, ids = f" {text}", []
        while text:
            piece = max(filter(text.startswith, self.pieces), key=len, default="<end>")
            ids.append(self.pieces.index(piece))
            text = text[len(piece) if piece != "<end>" else 1 :]
        return ids


def test_the_first_words_space_may_stand_there_where_it_is_not_printed() -> None:
    tokenizer = Prefixed()
    spaced = Alphabet(
        [piece.encode() for piece in tokenizer.pieces], [0], tokenizer.encode, spaced=True
    )
    constraint = spaced.constraint(regex("a b"), [0])
    assert ids(constraint.masks([])[0]) == {1, 2, 3}
    assert constraint.take([2]) == 1
    assert constraint.forced() == [4]
    assert ids(constraint.masks([])[0]) == {4}
    # The text itself begins with one, which is to be printed.
    constraint = spaced.constraint(regex(" ?a"), [0])
    assert ids(constraint.masks([])[0]) == {1, 2}
    with pytest.raises(OptionError, match="no token that may come first"):
        spaced.constraint(regex("c"), [0])


def test_filters_share_out_what_is_allowed() -> None:
    """The likeliest tokens are forbidden: top-k, top-p and min-p choose among the others."""
    logits = mx.array([[[9.0, 0.0, 1.0, 8.0, 7.0, 6.0, 9.0]]])
    for changes in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        chosen = Options(temperature=1.0, **changes)
        law = Distribution(chosen, len(PIECES), constraint=begun("[ab]+"))
        remaining = law.log_probabilities(logits, [], NO_DRAFT)[0, 0] > -mx.inf
        assert [id for id, yes in enumerate(remaining.tolist()) if yes] == [4]
    free = Distribution(chosen, len(PIECES))
    assert free.kind == Distribution(chosen, len(PIECES)).kind
    assert law.bound(1) and not free.bound(1)


def test_schemas_that_lead_deep_do_not_crash() -> None:
    """A server's threads have little stack."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d5000": {"enum": ["abc"]}}}
    grammar = compiled(json.dumps(schema), None, None)
    assert grammar is not None
    constraint = alphabet((*PIECES, '"')).constraint(grammar, [0])
    assert constraint.forced() == [7, 4, 3, 7]


# Compilation in several threads


def test_readers_at_the_same_time_leave_the_size_of_stacks_as_it_was() -> None:
    before = threading.stack_size()
    both_began, first_ended = threading.Barrier(2, timeout=30), threading.Event()

    def first() -> None:
        with_stack(both_began.wait)
        first_ended.set()

    def second() -> None:
        with_stack(lambda: (both_began.wait(), first_ended.wait(30)))

    with ThreadPoolExecutor(2) as threads:
        for future in (threads.submit(first), threads.submit(second)):
            future.result()
    try:
        assert threading.stack_size() == before
    finally:
        threading.stack_size(before)
