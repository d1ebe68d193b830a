"""What a model can write, and in which tokens: what grammars are read with. Imports no MLX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, is_panic
from .grammar import KEPT, Grammar, first_problem, library, limits, with_space, with_stack

MARKERS = ("", ".", "a")
"""Put before a text whose tokens are wanted as they are within another one."""


class Alphabet:
    """What a model can write, and in which tokens. texts: bytes per token id, as many as a
    distribution has entries. special: ids that are no text. encode: token ids of a text, maybe with
    special ones around it. spaced: the first token's leading space is not printed."""

    bos_token_id = None

    def __init__(
        self,
        texts: Sequence[bytes | None],
        special: Collection[int],
        encode: Callable[[str], Sequence[int]],
        *,
        spaced: bool = False,
    ) -> None:
        self._size = len(texts)
        # The names that llguidance asks for. Its end of a text is a token that nobody has: which
        # ones end a text is for constraints to say.
        self.eos_token_id = len(texts)
        self.tokens = [*(text or b"" for text in texts), b"<end>"]
        self.special_token_ids = [*(id for id in special if id < len(texts)), len(texts)]
        self._specials = frozenset(self.special_token_ids)
        self._encode = encode
        self._spaced = spaced
        self._fresh = functools.lru_cache(KEPT)(self._matcher)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens in which a model is used to write a text that stands within another one; the
        longest ones that fit where the tokenizer gives others, and the end that nobody has for
        what no token says: llguidance passes over what it is given no token for."""
        for marker in MARKERS:
            ids = self._encode(marker + text.decode("utf-8", "replace"))
            ids = [id for id in ids if id not in self._specials]
            # Many tokenizers put a space before what they are given.
            for begin in range(len(ids)):
                if b"".join(self.tokens[id] for id in ids[begin:] if id < len(self.tokens)) == text:
                    return ids[begin:]
        return list(self._longest(text))

    def constraint(
        self, grammar: Grammar, ends: Collection[int], banned: Collection[int] = ()
    ) -> Constraint:
        """Return the constraint of a new text. grammar: from grammar.compiled. ends: ids that end
        it. banned: ids that never come. Raises OptionError where nothing can be written."""
        make = functools.partial(Constraint, self._fresh(grammar), ends, self._size, banned)
        if not self._begins(make()):
            bans = ", logit-bias bans all of these" if banned else ""
            raise OptionError(
                "no text of this model fits json-schema, regex or grammar: its vocabulary has no "
                f"token that may come first{bans}, or the grammar is too complex"
            )
        return make()

    def _begins(self, constraint: Constraint) -> bool:
        """Whether a first token can come, and not only the space that is not printed."""
        space = self._ids.get(b" ")
        if self._spaced and space is not None:
            first = constraint.masks([])[0]
            only = sum(int(word).bit_count() for word in first) == 1 and has(first, space)
            if only and not constraint.stuck:
                constraint.take([space])
        constraint.masks([])
        return not constraint.stuck

    def _matcher(self, grammar: str) -> Any:
        """A matcher at the beginning of a text; others are copied from it."""
        matcher = self._read(grammar)
        if not self._spaced:
            return matcher
        # A text that itself begins with a space would lose it.
        always = matcher.try_consume_tokens([self._ids.get(b" ", self._size)]) == 1
        return self._read(with_space(grammar, always=always))

    def _read(self, grammar: str) -> Any:
        make = functools.partial(library().LLMatcher, log_level=0, limits=limits())
        matcher = with_stack(lambda: make(self._tokenizer, grammar))
        if matcher.is_error():
            raise OptionError(
                f"json-schema, regex or grammar is wrong: {first_problem(matcher.get_error())}"
            )
        return matcher

    @functools.cached_property
    def _tokenizer(self) -> Any:
        llguidance = library()
        wrapped = llguidance.TokenizerWrapper(self)
        return llguidance.LLTokenizer(wrapped, n_vocab=len(self.tokens))

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {own: id for id, own in enumerate(self.tokens) if own and id not in self._specials}

    def _longest(self, text: bytes) -> Iterable[int]:
        most = max(map(len, self._ids), default=0)
        while text:
            sizes = range(min(len(text), most), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), 0)
            yield self._ids[text[:size]] if size else self.eos_token_id
            text = text[max(size, 1) :]


Answer = TypeVar("Answer")
Words = NDArray[np.uint32]
"""(rows, words): a bit for each token id, the lowest one of a word first."""
ALL = np.uint32(0xFFFFFFFF)


@dataclass(eq=False)
class Constraint:
    """What a grammar allows in one sequence. fresh: llguidance's matcher at the beginning, which is
    copied. ends: ids that end the text; they may come where the grammar is complete, and nowhere
    else. size: of the vocabulary. banned: ids that never come, whatever the grammar says. complete:
    whether `take` refused a token because nothing can follow a text that fits the grammar: every
    token that ends a text is banned."""

    fresh: Any
    ends: Collection[int]
    size: int
    banned: Iterable[int] = ()
    complete: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._matcher = self.fresh.deep_copy()
        self._possible = np.full((self.size + 31) // 32, ALL)
        for id in (*self.banned, *range(self.size, 32 * len(self._possible))):
            self._possible[id // 32] &= ~(np.uint32(1) << np.uint32(id % 32))
        self._taken: list[int] = []
        self._over = False
        self._dead: int | None = None
        self._failed = False

    @property
    def stuck(self) -> bool:
        """Whether one of the rows of `masks` allows nothing that the model can write, or that row
        or what was taken needs more than llguidance's limits."""
        return self._dead is not None

    def take(self, tokens: Sequence[int]) -> int:
        """Commit tokens up to the first one that the grammar does not allow, and return their
        number. Tokens behind an end token are not checked."""
        if self._over:
            return len(tokens)
        return self._answer(lambda: self._take(tokens), 0)

    def _take(self, tokens: Sequence[int]) -> int:
        text = self._before_end(tokens)
        masked = text if self._dead is None else text[: self._dead]
        count: int = self._matcher.try_consume_tokens(masked)
        self._taken += text[:count]
        if count == len(tokens):
            return count
        self._over = True
        if self._matcher.is_error():
            self._dead = 0
        elif self._matcher.is_accepting() and count == len(text) != self._dead:
            return len(tokens)
        else:
            self.complete = count == self._dead and self._matcher.is_accepting()
        return count

    def verifiable(self, drafted: Sequence[int]) -> int:
        """How many drafted tokens, from the first on, are worth a look: up to and with the first
        one that cannot come, or that ends the text. Rules have to see that one: what is drawn in
        its place depends on what it was drawn from."""
        if self._over:
            return len(drafted)
        text = takewhile(lambda token: 0 <= token < self.size, self._before_end(drafted))
        possible = self._answer(lambda: self._matcher.validate_tokens(list(text)), 0)
        self._answer(lambda: self._take_back(0), None)
        return min(possible + 1, len(drafted))

    def masks(self, drafted: Sequence[int]) -> Words:
        """What may come at each position: row j behind j of the drafted tokens, (n + 1, words).
        Rows that no rule gets to, behind a token that cannot come, allow everything. So does one
        where nothing can come: `stuck` is true then, and `take` refuses what is chosen there."""
        rows = np.full((len(drafted) + 1, (self.size + 31) // 32), ALL)
        self._dead = None
        if not self._over:
            self._answer(lambda: self._mask(rows, drafted), None)
        return rows

    def _mask(self, rows: Words, drafted: Sequence[int]) -> None:
        taken = 0
        for place, row in enumerate(rows):
            allowed = self._allowed()
            if allowed is None:
                self._dead = place
                break
            row[:] = allowed
            token = drafted[place] if place < len(drafted) else -1
            # A token that the text goes on with is taken for a while.
            if token in self.ends or not has(row, token):
                break
            if self._matcher.try_consume_tokens([token]) != 1:
                break
            taken += 1
        self._take_back(taken)

    def forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice about, in the tokens of canonical text."""
        if self._over:
            return []
        tokens: list[int] = self._answer(lambda: self._matcher.compute_ff_tokens(), [])
        self._answer(lambda: self._take_back(0), None)
        return list(takewhile(lambda token: token < self.size, tokens))

    def _answer(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return what `ask` returns, or `otherwise` if llguidance panics: this text alone is stuck
        from then on."""
        if not self._failed:
            try:
                return ask()
            except BaseException as problem:
                if not (isinstance(problem, Exception) or is_panic(problem)):
                    raise
                self._failed = True
        self._dead = 0
        return otherwise

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token: token not in self.ends, tokens))

    def _allowed(self) -> Words | None:
        """What may come here; None where nothing can."""
        # It has more bits than there are tokens.
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")
        if self._matcher.is_error():
            return None
        words = words[: len(self._possible)].astype(np.uint32)
        complete = self._matcher.is_accepting()
        for end in self.ends:
            bit = np.uint32(1 << end % 32)
            words[end // 32] = words[end // 32] & ~bit | (bit if complete else np.uint32(0))
        words &= self._possible
        return words if words.any() else None

    def _take_back(self, count: int) -> None:
        """Forget `count` tokens. A matcher with an error, which a draft can cause, is replaced."""
        if self._matcher.is_error() or (count and not self._matcher.rollback(count)):
            self._matcher = self.fresh.deep_copy()
            self._matcher.try_consume_tokens(self._taken)


def has(row: Words, token: int) -> bool:
    """Return whether a row allows a token; ids outside the vocabulary are not allowed."""
    if not 0 <= token < 32 * len(row):
        return False
    return bool(row[token // 32] >> np.uint32(token % 32) & np.uint32(1))
