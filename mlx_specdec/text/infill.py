"""Prompts for the middle of a text (FIM), with a model's tokens for prefix and suffix. Sources:
AutocompleteTemplate.ts of Continue, and format_prompt_infill of llama.cpp."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..checkpoints.formats.vocabularies import END_TOKENS as ENDS_OF_SEQUENCES
from .tokenizer import Tokenizer

MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Granite 4, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder2, StableCode
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]"),  # Codestral, the suffix first
)
FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
MIDDLE_ENDS = (
    *(*FILE_SEPARATORS, "<|repo_name|>", "<repo_name>", "<reponame>"),
    *("<|fim_pad|>", "<fim_pad>", "▁<EOT>"),
)
"""Further tokens that end the middle."""
LETTER = "\u263a"
"""A character that is put before a suffix, so that the tokenizer adds no space there."""


@dataclass(frozen=True)
class Infill:
    """The tokens of one model for prompts of this kind.

    Attributes:
        marks: The marks of prefix, suffix and middle, without the last if the suffix comes first.
        file: The mark before each further file, if there is one.
        ends: The tokens that end the middle.
        spaced: Whether the tokenizer adds a space before a text.
    """

    tokenizer: Tokenizer
    marks: tuple[int, ...]
    file: tuple[int, ...]
    ends: tuple[int, ...]
    spaced: bool

    def prompt(
        self,
        before: str,
        after: str,
        files: Sequence[tuple[str, str]] = (),
        room: int | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            before: The text before the middle.
            after: The text after the middle.
            files: Names and texts of files that come first.
            room: Largest number of tokens, or None for no limit. The suffix gets a quarter of them,
                or as many as the prefix leaves. Files lose their beginning first, and the prefix
                after them. The prefix is cut in steps of an eighth, since every change of its
                beginning defeats the prefix cache.
        """
        inner, special = self.tokenizer.inner, self.tokenizer.special_ids
        alone = self.tokenizer.encode(LETTER)
        ids = alone[: next((at for at, id in enumerate(alone) if id not in special), 0)]
        more: list[int] = []
        for name, text in files:
            more += [*self.file, *inner(f"{'' if self.file else '+++++ '}{name}\n{text}\n")]
        suffix = inner(after)
        if self.spaced:
            suffix = inner(LETTER + after)[len(inner(LETTER)) :]
        prefix, (first, second, *middle) = inner(before), self.marks
        if room is not None:
            room = max(0, room - len(ids) - len(self.marks))
            suffix = suffix[: max(room // 4, room - len(prefix))]
            step, over = max(1, room // 8), len(prefix) - (room - len(suffix))
            prefix = prefix[step * -(-max(0, over) // step) :]
            more = more[max(0, len(more) - (room - len(prefix) - len(suffix))) :]
        ids += more
        if not middle:
            return [*ids, second, *suffix, first, *prefix]
        return [*ids, first, *prefix, second, *suffix, *middle]


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """Return the tokens of a model for filling in, or None if its vocabulary has none."""
    ids = tokenizer.ids
    for marks in MARKS:
        if all(mark in ids for mark in marks):
            found = tuple(ids[mark] for mark in marks)
            file = tuple(ids[name] for name in FILE_SEPARATORS if name in ids)[:1]
            ends = {*found, *(ids[name] for name in MIDDLE_ENDS if name in ids)}
            special = tokenizer.special_ids
            ends |= {ids[name] for name in ENDS_OF_SEQUENCES if ids.get(name) in special}
            return Infill(tokenizer, found, file, tuple(sorted(ends)), marks[0].startswith("▁"))
    return None
