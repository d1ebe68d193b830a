"""Constraints: the masks of tokens that a grammar, or the budget of a thought, allows. Imports no
MLX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, is_panic
from ..text.thoughts import Thoughts
from .grammar import KEPT, Grammar, first_problem, library, limits, with_space, with_stack

MARKERS = ("", ".", "a")
"""Prefixes for tokenizing a string, since tokenizers treat the start of a text specially."""


class Alphabet:
    """The vocabulary of a model in the form that llguidance needs.

    Args:
        texts: Bytes per token id, one entry per entry of a distribution.
        special: Ids of special tokens, which have no text.
        encode: Returns the token ids of a text, possibly with special tokens around them.
        spaced: Whether decoding drops the leading space of the first token."""

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
        # llguidance requires these attribute names. The EOS token is an additional id that no model
        # has, because each constraint has its own EOS tokens.
        self.eos_token_id = len(texts)
        self.tokens = [*(text or b"" for text in texts), b"<end>"]
        self.special_token_ids = [*(id for id in special if id < len(texts)), len(texts)]
        self._specials = frozenset(self.special_token_ids)
        self._encode = encode
        self._spaced = spaced
        self._fresh = functools.lru_cache(KEPT)(self._matcher)

    def __call__(self, text: bytes) -> list[int]:
        """Return the canonical tokens of a string inside a longer text.

        If the tokenizer cannot reproduce the bytes, use the longest matching tokens. Bytes without
        a token become the additional EOS id, since llguidance ignores bytes without a token."""
        for marker in MARKERS:
            ids = self._encode(marker + text.decode("utf-8", "replace"))
            ids = [id for id in ids if id not in self._specials]
            # Many tokenizers put a space before their input.
            for begin in range(len(ids)):
                if b"".join(self.tokens[id] for id in ids[begin:] if id < len(self.tokens)) == text:
                    return ids[begin:]
        return list(self._longest(text))

    def constraint(
        self,
        grammar: Grammar,
        ends: Collection[int],
        banned: Collection[int] = (),
        *,
        open_end: bool = False,
    ) -> Constraint:
        """Return the constraint of a new sequence; see `Constraint`. Raises OptionError if the
        grammar allows no token of the vocabulary."""
        fresh = self._fresh(grammar)
        make = functools.partial(Constraint, fresh, ends, self._size, banned, open_end)
        if not self._begins(make()):
            bans = ", logit-bias bans all of these" if banned else ""
            raise OptionError(
                "no text of this model fits json-schema, regex or grammar: its vocabulary has no "
                f"token that may come first{bans}, or the grammar is too complex"
            )
        return make()

    def _begins(self, constraint: Constraint) -> bool:
        """Return whether the grammar allows a first token other than an unprinted space."""
        space = self._ids.get(b" ")
        if self._spaced and space is not None:
            [first] = constraint.masks([])
            if np.flatnonzero(first).tolist() == [space] and not constraint.stuck:
                constraint.take([space])
        constraint.masks([])
        return not constraint.stuck

    def _matcher(self, grammar: str) -> Any:
        """Return a matcher at the start of a sequence. Every constraint copies it."""
        matcher = self._read(grammar)
        if not self._spaced:
            return matcher
        # Decoding would drop the space of an output that itself begins with a space.
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
        return {raw: id for id, raw in enumerate(self.tokens) if raw and id not in self._specials}

    def _longest(self, text: bytes) -> Iterable[int]:
        most = max(map(len, self._ids), default=0)
        while text:
            sizes = range(min(len(text), most), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), 0)
            yield self._ids[text[:size]] if size else self.eos_token_id
            text = text[max(size, 1) :]


Answer = TypeVar("Answer")
Masks = NDArray[np.bool_]
"""Whether each token is allowed, (rows, vocabulary)."""


@dataclass(eq=False)
class Constraint:
    """The state of a grammar in one sequence.

    Attributes:
        fresh: llguidance's matcher at the start of a sequence, which is copied.
        ends: Ids of EOS tokens. The mask allows them exactly if the text fits the grammar.
        size: The number of token ids.
        banned: Ids that are never allowed.
        open_end: Whether a complete text may be followed by any token. A token that does not
            continue the text ends it, as an EOS token does.
        complete: Whether `take` refused a token after a complete text: one with an open end, or one
            that nothing can follow because all EOS tokens are banned."""

    fresh: Any
    ends: Collection[int]
    size: int
    banned: Iterable[int] = ()
    open_end: bool = False
    complete: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._matcher = self.fresh.deep_copy()
        self._possible = np.ones(self.size, bool)
        self._possible[list(self.banned)] = False
        self._taken: list[int] = []
        self._over = False
        self._dead: int | None = None
        self._failed = False

    @property
    def stuck(self) -> bool:
        """Whether a row of the last `masks` allows no token, or the committed tokens or that row
        exceeded llguidance's limits."""
        return self._dead is not None

    def idle(self, count: int) -> bool:
        """Return whether each of the next `count` tokens may be any token, whatever the others
        are. If so, `masks` need not be asked."""
        return False

    def take(self, tokens: Sequence[int]) -> int:
        """Commit tokens up to the first one that the grammar forbids, and return their number.
        Tokens after an EOS token are not checked."""
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
            ends = self.open_end or count == self._dead
            self.complete = ends and self._matcher.is_accepting()
        return count

    def verifiable(self, drafted: Sequence[int]) -> int:
        """Return how many draft tokens to verify: all tokens up to and including the first one
        that is forbidden or that ends the sequence.

        The first forbidden token is included because the distribution of the correction depends on
        the distribution from which the token was drawn."""
        if self._over:
            return len(drafted)
        text = takewhile(lambda token: 0 <= token < self.size, self._before_end(drafted))
        possible = self._answer(lambda: self._matcher.validate_tokens(list(text)), 0)
        self._answer(lambda: self._take_back(0), None)
        return min(possible + 1, len(drafted))

    def masks(self, drafted: Sequence[int]) -> Masks:
        """Return whether each token is allowed at each position, (n + 1, vocabulary).

        Row j is the mask after j draft tokens. Rows after a forbidden token allow everything, since
        no rule uses them. A row without any allowed token also allows everything; then `stuck` is
        true, and `take` refuses the token that is chosen there."""
        rows = np.ones((len(drafted) + 1, self.size), bool)
        self._dead = None
        if not self._over:
            self._answer(lambda: self._mask(rows, drafted), None)
        return rows

    def _mask(self, rows: Masks, drafted: Sequence[int]) -> None:
        taken = 0
        for index, (row, token) in enumerate(zip(rows, [*drafted, -1], strict=True)):
            allowed = self._allowed()
            if not allowed.any():
                self._dead = index
                break
            row[:] = allowed
            # The matcher consumes an allowed draft token until the end of this method.
            if token in self.ends or not (0 <= token < self.size and row[token]):
                break
            if self._matcher.try_consume_tokens([token]) != 1:
                break
            taken += 1
        self._take_back(taken)

    def forced(self) -> list[int]:
        """Return the next tokens that the grammar determines, in canonical tokenization."""
        if self._over:
            return []
        tokens: list[int] = self._answer(lambda: self._matcher.compute_ff_tokens(), [])
        self._answer(lambda: self._take_back(0), None)
        return list(takewhile(lambda token: token < self.size, tokens))

    def _answer(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return the result of `ask`, or `otherwise` if llguidance fails. After a failure, the
        constraint of this sequence is stuck."""
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

    def _allowed(self) -> Masks:
        """Return the mask of the next position, (vocabulary,)."""
        # llguidance's mask has one bit per token, and more bits than there are tokens.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return np.zeros(self.size, bool)
        complete = self._matcher.is_accepting()
        if complete and self.open_end:
            return self._possible
        allowed = np.unpackbits(bits, count=self.size, bitorder="little").astype(bool)
        allowed[list(self.ends)] = complete
        return allowed & self._possible

    def _take_back(self, count: int) -> None:
        """Remove `count` tokens. If a draft token caused an error, make a new matcher."""
        if self._matcher.is_error() or (count and not self._matcher.rollback(count)):
            self._matcher = self.fresh.deep_copy()
            self._matcher.try_consume_tokens(self._taken)


@dataclass(eq=False)
class ThoughtBudget:
    """A constraint that forces the end mark of a thought, in one sequence. `Constraint` documents
    the methods.

    Attributes:
        thoughts: The thoughts of the committed tokens.
        size: The number of token ids.
        grammar: Another constraint of the sequence, or None. If it forbids the mark at the
            position at which the budget ends, it decides alone.
    """

    thoughts: Thoughts
    size: int
    grammar: Constraint | None = None

    @property
    def stuck(self) -> bool:
        return self.grammar is not None and self.grammar.stuck

    @property
    def complete(self) -> bool:
        return self.grammar is not None and self.grammar.complete

    def idle(self, count: int) -> bool:
        return self.grammar is None and self.thoughts.never_forced(count)

    def take(self, tokens: Sequence[int]) -> int:
        count = len(tokens) if self.grammar is None else self.grammar.take(tokens)
        self.thoughts = self.thoughts.after(tokens[:count])
        return count

    def verifiable(self, drafted: Sequence[int]) -> int:
        return len(drafted) if self.grammar is None else self.grammar.verifiable(drafted)

    def masks(self, drafted: Sequence[int]) -> Masks:
        if self.grammar is None:
            rows = np.ones((len(drafted) + 1, self.size), bool)
        else:
            rows = self.grammar.masks(drafted)
        thoughts = self.thoughts
        for at, row in enumerate(rows):
            if (token := thoughts.forced) is not None and row[token]:
                row[:] = False
                row[token] = True
            if at < len(drafted):
                thoughts = thoughts.after([drafted[at]])
        return rows

    def forced(self) -> list[int]:
        return [] if self.grammar is None else self.grammar.forced()
