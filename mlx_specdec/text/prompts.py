"""Makes token ids of prompts, also of prompts for the middle of a text (FIM). Reads files of
prompts, and documents for lookup."""

import json
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.formats.vocabularies import END_TOKENS
from ..errors import DocumentError, PromptError
from ..system import read_lines, read_text
from .chat import Messages
from .tokenizer import Tokenizer

NO_PROMPT = 'a prompt is text, token ids, or messages, each {"role": ..., "content": ...}'
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
LARGEST_DOCUMENTS = 1 << 28
"""Largest number of bytes of all documents together. Their index takes five times the memory."""
PIECE = re.compile(r"(?s).{1,65536}[^\n]{0,65536}\n?")
"""Matches the text that is tokenized at a time: characters, and the rest of their last line."""
# Sources: AutocompleteTemplate.ts of Continue, and format_prompt_infill of llama.cpp.
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
class Prompt:
    """A prompt of a file.

    Attributes:
        turns: The user's messages.
        category: A name for reports, or None.
        target: The completion to train on, or "".
    """

    turns: tuple[str, ...]
    category: str | None = None
    target: str = ""


def read_prompts(file: Path, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a file: texts, or objects in the format of MT-bench and
    Spec-Bench, with "prompt", "text" or "turns", and optionally "category" and "target". Raises
    PromptError."""
    lines = read_lines(file, limit)
    if not lines:
        raise PromptError(f"{file} has no prompts: write one a line")
    return [
        Prompt((line,)) if isinstance(line, str) else _from_object(line, where)
        for where, line in lines
    ]


def _from_object(entry: dict[str, Any], where: str) -> Prompt:
    text = entry.get("prompt", entry.get("text"))
    turns: Any = entry.get("turns") if text is None else [text]
    is_list = isinstance(turns, list) and turns
    if not is_list or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        wanted = '"prompt" or "text", a string, or "turns", a list of strings'
        raise PromptError(f"{where} needs {wanted}, none of them empty")
    category, target = entry.get("category") or "", entry.get("target", "")
    for name, value in (("category", category), ("target", target)):
        if not isinstance(value, str):
            raise PromptError(f'{where} has a "{name}" that is no string, but "{name}" must be one')
    return Prompt(tuple(turns), category or None, target)


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8. Lone surrogates, which no tokenizer reads, become U+FFFD. Numbers that
    are too large for a float become the largest ones, since JSON cannot write infinity.

    Raises:
        ValueError: If the text is not JSON.
        RecursionError: If it is nested too deeply.
    """
    value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_json, parse_float=_finite)
    if b"\\u" in data and HALF_A_CHARACTER.search(text := json.dumps(value, ensure_ascii=False)):
        # A client that cuts a text within an emoji sends the half in every later turn.
        value = json.loads(HALF_A_CHARACTER.sub("\ufffd", text))
    return value


def _finite(text: str) -> float:
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _no_json(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no number", "", 0)


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | Messages,
    chat_template: bool,
    system_prompt: str | None = None,
    chat_settings: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: A text, the messages of a chat, or token ids.
        chat_template: Whether a text becomes the user's message, if the model has a chat template.
        system_prompt: The system message, or None.
        chat_settings: Variables of the chat template.
    Raises:
        PromptError: If the model cannot read the prompt.
    """
    if isinstance(prompt, bytes):
        raise PromptError("the prompt is bytes: decode them, a prompt is text")
    if not hasattr(prompt, "__len__"):
        raise PromptError(NO_PROMPT)
    if not (prompt.strip() if isinstance(prompt, str) else len(prompt)):
        raise PromptError("the prompt is empty: give some text")
    for text in (prompt, system_prompt):
        if isinstance(text, str) and HALF_A_CHARACTER.search(text):
            raise PromptError("a prompt has half a character in it, a lone surrogate: leave it out")
    if is_chat(tokenizer, prompt, chat_template=chat_template):
        is_text = isinstance(prompt, str)
        messages: Any = [{"role": "user", "content": prompt}] if is_text else prompt
        if system_prompt is not None:
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return tokenizer.apply_chat(messages, chat_settings)
    has_text = isinstance(prompt, str) or _are_messages(prompt)
    if system_prompt is not None or chat_settings:
        raise PromptError(
            "a system prompt and settings of a chat template need one, and "
            + ("this model has none" if has_text else "token ids take none")
            + ": leave them out"
        )
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if has_text:
        raise PromptError("this model has no chat template: give the prompt as text")
    try:
        return [operator.index(cast(int, token)) for token in prompt]
    except TypeError:
        raise PromptError(NO_PROMPT) from None


def is_chat(
    tokenizer: Tokenizer, prompt: str | Sequence[int] | Messages, *, chat_template: bool
) -> bool:
    """Return whether `prompt_ids` applies the chat template to a prompt."""
    read = chat_template if isinstance(prompt, str) else _are_messages(prompt)
    return tokenizer.has_chat_template and read


def _are_messages(prompt: Sequence[Any]) -> bool:
    fields = {"role", "content"}
    return all(isinstance(message, Mapping) and message.keys() >= fields for message in prompt)


def tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[NDArray[np.int32]]:
    """Return the token ids of each document, without the special tokens around a prompt.

    Args:
        report: Called with the number of characters that are done, and of all characters.
    Raises:
        DocumentError: If a document cannot be read or is not text, or if all are too large.
    """
    size = sum(file.stat().st_size for file in files if file.exists())
    if size > LARGEST_DOCUMENTS:
        most = f"at most {LARGEST_DOCUMENTS / 2**20:.0f} can be searched: leave some out"
        raise DocumentError(f"the documents to look up have {size / 2**20:.0f} MiB, and {most}")
    texts = [read_text(file, DocumentError) for file in files]
    for file, text in zip(files, texts, strict=True):
        if "\0" in text:
            raise DocumentError(f"{file} is not UTF-8 text: only text can be looked up")
        if not text.strip():
            raise DocumentError(f"{file} is empty: there is nothing to look up in it")
    total, done = sum(map(len, texts)), 0
    documents = []
    report(0, total)
    for text in texts:
        parts = []
        for piece in PIECE.findall(text):
            parts.append(np.array(tokenizer.inner(piece), np.int32))
            done += len(piece)
            report(done, total)
        documents.append(np.concatenate(parts))
    return documents


@dataclass(frozen=True)
class Infill:
    """The tokens of one model for prompts for the middle of a text.

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
            ends |= {ids[name] for name in END_TOKENS if ids.get(name) in special}
            return Infill(tokenizer, found, file, tuple(sorted(ends)), marks[0].startswith("▁"))
    return None
