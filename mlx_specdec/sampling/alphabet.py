"""What a model can write, and in which tokens: what grammars are read with. Imports no MLX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import OptionError
from .constraint import Constraint, has
from .grammar import Grammar, library, limits, told, with_space, with_stack

MARKERS = ("", ".", "a")
"""Put before a text whose tokens are wanted as they are within another one."""


class Alphabet:
    """What a model can write, and in which tokens.

    texts: per token id its bytes, None where it has none; as many as a distribution has entries.
    special: ids that are no text. encode: token ids of a text, maybe with special ones around it.
    spaced: the first token's leading space is not printed.
    """

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
        self._encode = encode
        self._spaced = spaced
        self._fresh: WeakKeyDictionary[Grammar, Any] = WeakKeyDictionary()

    def __call__(self, text: bytes) -> list[int]:
        """The tokens in which a model is used to write a text that stands within another one; the
        longest ones that fit where the tokenizer gives others, and the end that nobody has for
        what no token says: llguidance passes over what it is given no token for."""
        for marker in MARKERS:
            ids = self._encode(marker + text.decode("utf-8", "replace"))
            ids = [id for id in ids if id not in self._specials]
            # Many tokenizers put a space before what they are given.
            for begin in range(len(ids)):
                if self._spell(ids[begin:]) == text:
                    return ids[begin:]
        return list(self._longest(text))

    def constraint(
        self, grammar: Grammar, ends: Collection[int], banned: Collection[int] = ()
    ) -> Constraint:
        """Of a text that has not begun. grammar: from grammar.compiled. ends: ids that end it.
        banned: ids that never come.

        Raises OptionError for a grammar of which nothing can be written.
        """
        fresh = self._fresh.get(grammar)
        if fresh is None:
            fresh = self._fresh.setdefault(grammar, self._matcher(grammar))
        make = functools.partial(Constraint, fresh, ends, self._size, banned)
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
                f"json-schema, regex or grammar is wrong: {told(matcher.get_error())}"
            )
        return matcher

    @functools.cached_property
    def _tokenizer(self) -> Any:
        llguidance = library()
        wrapped = llguidance.TokenizerWrapper(self)
        return llguidance.LLTokenizer(wrapped, n_vocab=len(self.tokens))

    @functools.cached_property
    def _specials(self) -> frozenset[int]:
        return frozenset(self.special_token_ids)

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {own: id for id, own in enumerate(self.tokens) if own and id not in self._specials}

    def _spell(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[id] if id < len(self.tokens) else b"" for id in ids)

    def _longest(self, text: bytes) -> Iterable[int]:
        while text:
            sizes = range(min(len(text), self._most), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), 0)
            yield self._ids[text[:size]] if size else self.eos_token_id
            text = text[max(size, 1) :]

    @functools.cached_property
    def _most(self) -> int:
        return max(map(len, self._ids), default=0)
