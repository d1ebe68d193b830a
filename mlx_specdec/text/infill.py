"""Prompts for the middle of a text (FIM): which tokens a model marks prefix and suffix with.
Sources: AutocompleteTemplate.ts of Continue, and format_prompt_infill of llama.cpp."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..checkpoints.formats.vocabularies import ENDS as ENDS_OF_SEQUENCES
from .tokenizer import Tokenizer, ids_by_piece

MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Granite 4, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder2, StableCode
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral, the suffix first
)
FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
ENDS = (*FILES, "<|repo_name|>", "<repo_name>", "<reponame>", "<|fim_pad|>", "<fim_pad>", "▁<EOT>")
"""Further tokens that end a middle."""
LETTER = "\u263a"
"""Stands before a suffix, so that a tokenizer puts no space there."""


@dataclass(frozen=True)
class Infill:
    """The ids of one model.

    marks: The marks of prefix, suffix and middle; no middle if the suffix comes first.
    file: The mark before each further file, None without one.
    ends: The tokens that end the middle.
    """

    tokenizer: Tokenizer
    marks: tuple[int, ...]
    file: int | None
    ends: tuple[int, ...]
    spaced: bool

    def prompt(
        self,
        before: str,
        after: str,
        files: Sequence[tuple[str, str]] = (),
        room: int | None = None,
    ) -> list[int]:
        """Return the ids of a prompt, which is cut to `room` tokens: a quarter is the suffix's, or
        what the prefix leaves, then comes the end of the prefix, then that of the files. The prefix
        loses an eighth of them at a time, so that not every keystroke moves where it begins.
        files: names and texts that come first."""
        encode, special = self.tokenizer.encode, self.tokenizer.special_ids
        alone = encode(LETTER)
        ids = alone[: next((at for at, id in enumerate(alone) if id not in special), 0)]
        more: list[int] = []
        for name, text in files:
            if self.file is None:
                more += self._inner(f"+++++ {name}\n{text}\n")
            else:
                more += [self.file, *self._inner(f"{name}\n{text}\n")]
        if self.spaced:
            suffix = self._inner(LETTER + after)[len(self._inner(LETTER)) :]
        else:
            suffix = self._inner(after)
        prefix, (first, second, *middle) = self._inner(before), self.marks
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

    def _inner(self, text: str) -> list[int]:
        """Return the ids of a text without the special tokens around it."""
        ids = self.tokenizer.encode(text)
        special = self.tokenizer.special_ids
        inner = [at for at, id in enumerate(ids) if id not in special]
        return ids[inner[0] : inner[-1] + 1] if inner else []


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """Return how a model fills in, None where its vocabulary has no tokens for that."""
    ids = ids_by_piece(tokenizer)
    for marks in MARKS:
        named = [mark for mark in marks if mark]
        if all(mark in ids for mark in named):
            found = tuple(ids[mark] for mark in named)
            files = [ids[name] for name in FILES if name in ids]
            ends = {*found, *(ids[name] for name in ENDS if name in ids)}
            special = tokenizer.special_ids
            ends |= {ids[name] for name in ENDS_OF_SEQUENCES if ids.get(name) in special}
            spaced = marks[0].startswith("▁")
            return Infill(tokenizer, found, next(iter(files), None), tuple(sorted(ends)), spaced)
    return None
