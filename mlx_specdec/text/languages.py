"""The languages of a translation model: how a request's become parts of its prompt."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from ..errors import OptionError
from .tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


class Languages:
    """The languages that a model names. A family says in a subclass where they go. known: code, as
    users write it -> token id. required: whether a text needs a target language."""

    required = False

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.known = ids

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        """Return the token ids of a source text. encode: the tokenizer's. source, target: codes."""
        return encode(text)

    def prefix(self, start: Sequence[int], target: str | None) -> list[int]:
        """Return the tokens that a text begins with, as many as `start`, those without a target
        language."""
        return [*start]

    def find(self, option: str, name: str | None) -> str | None:
        """Return the code that a user means: a known one, or the part of one alone before "_" where
        no other begins so. Raises OptionError, with all codes, for another."""
        if name is None or name in self.known:
            return name
        begun = [code for code in self.known if code.partition("_")[0] == name]
        if len(begun) != 1:
            raise OptionError(
                f"{option} must be a language that the model knows, not {name!a:.40}: "
                + ", ".join(begun or sorted(self.known))
            )
        return begun[0]


class LanguageTags(Languages):
    """Languages whose tags are tokens that the source text begins with."""

    def __init__(self, ids: Mapping[str, int], form: str) -> None:
        super().__init__(ids)
        self._form = form

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: str) -> Self | None:
        """Return the languages with tags of this form among the tokens; None for fewer than two.
        form: a tag with {} in the place of the code."""
        before, after = map(re.escape, form.split("{}"))
        tag = re.compile(rf"{before}(\w{{2,}}){after}", re.ASCII)
        found = ((tag.fullmatch(piece or ""), id) for id, piece in enumerate(tokenizer.pieces()))
        ids = {match[1]: id for match, id in found if match}
        return cls(ids, form) if len(ids) > 1 else None

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        """The source's language is recognized by the model."""
        return encode(text if target is None else f"{self._form.format(target)} {text}")
