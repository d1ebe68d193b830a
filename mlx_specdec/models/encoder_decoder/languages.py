"""The languages of a translation model, and their place in prompts."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from ...errors import OptionError
from ...text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


class Languages:
    """The languages of a model. Subclasses of model families put them into prompts.

    Attributes:
        known: Token ids by the codes that users write.
        required: Whether a request needs a target language.
    """

    required = False

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.known = ids

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        """Return the token ids of a source text. source, target: Codes of the languages."""
        return encode(text)

    def prefix(self, start: Sequence[int], target: str | None) -> list[int]:
        """Return the first tokens of a completion. start: The first tokens without a target
        language. The result has as many."""
        return [*start]

    def find(self, option: str, name: str | None) -> str | None:
        """Return the code that a user means: a code, or the part of a code before "_" if no other
        code begins with it. Raises OptionError, which lists all codes, for any other name."""
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
    """Languages whose tags are tokens at the beginning of the source text."""

    def __init__(self, ids: Mapping[str, int], form: str) -> None:
        super().__init__(ids)
        self._form = form

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: str) -> Self | None:
        """Return the languages that have tags of this form among the tokens, or None if there are
        fewer than two. form: A tag with {} in place of the code."""
        before, after = map(re.escape, form.split("{}"))
        tag = re.compile(rf"{before}(\w{{2,}}){after}", re.ASCII)
        found = ((tag.fullmatch(piece or ""), id) for id, piece in enumerate(tokenizer.pieces))
        ids = {match[1]: id for match, id in found if match}
        return cls(ids, form) if len(ids) > 1 else None

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        """Return the token ids of a source text. The model recognizes the source language."""
        return encode(text if target is None else f"{self._form.format(target)} {text}")
