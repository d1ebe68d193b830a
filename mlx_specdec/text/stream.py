"""Incremental decoding of token ids to text, and stop strings. The pieces add up to the text of all
ids, although only a window of the newest ids is decoded at a time."""

from collections.abc import Mapping, Sequence
from os.path import commonprefix

from .thoughts import overlap
from .tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
LONGEST_WINDOW = 24
"""Number of tokens after which the window is shortened to SHORT_WINDOW tokens."""
SHORT_WINDOW = 6


class TextStream:
    """The incremental decoding of one completion. Text that later tokens may change is held back.

    Args:
        shown: The texts of special ids that are printed, by id.
        before: The ids of the prompt. Without them, many tokenizers leave out the space before the
            first word.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: Mapping[int, str] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._shown = shown or {}
        self._bytes = tokenizer.byte_ids
        # The last ids that are not special, SHORT_WINDOW of them. If these begin within a run of
        # byte pieces, the window has the whole run.
        self._window: list[int] = []
        for id in reversed(before):
            if len(self._window) >= SHORT_WINDOW and self._window[-1] not in self._bytes:
                break
            if id not in self._special:
                self._window.append(id)
        self._window.reverse()
        # The text of `before`, as long as no text after it has been printed.
        self._before = tokenizer.decode(self._window) if self._window else ""
        self._printed = len(self._before)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain with `ids`. It is "" within a character."""
        if self._shown.keys().isdisjoint(ids):
            return self._push(ids)
        texts = []
        for id in ids:
            if id in self._shown:
                texts += [self.finish(), self._shown[id]]
            else:
                texts.append(self._push([id]))
        return "".join(texts)

    def _push(self, ids: Sequence[int]) -> str:
        self._window += [id for id in ids if id not in self._special]
        if not self._window or self._window[-1] in self._bytes:
            return ""
        text, printed = self._decode()
        certain = len(text.rstrip(INCOMPLETE))
        if new := text[printed:certain]:
            self._before, self._printed = "", certain
        if certain == len(text) and len(self._window) > LONGEST_WINDOW:
            # Keep a few printed tokens, since the first token of a text loses its leading space.
            self._before, self._window = "", self._window[-SHORT_WINDOW:]
            self._printed = len(self._tokenizer.decode(self._window))
        return new

    def pending(self) -> str:
        """Return the text of a run of byte pieces as if it ended here, or "" within a character."""
        if not self._window or self._window[-1] not in self._bytes:
            return ""
        text, printed = self._decode()
        return "" if text.endswith(INCOMPLETE) else text[printed:]

    def finish(self) -> str:
        text, printed = self._decode() if self._window else ("", 0)
        self._before, self._window, self._printed = "", [], 0
        return text[printed:]

    def _decode(self) -> tuple[str, int]:
        """Return the text of the window and the number of its characters that were printed."""
        text = self._tokenizer.decode(self._window)
        if text.startswith(self._before):
            return text, self._printed
        # The new tokens complete a character whose first bytes are the end of `before`.
        return text, len(commonprefix([self._before, text]))  # noqa: RUF071


class StopStrings:
    """A search for stop strings in a stream, which holds back possible beginnings of stop strings.

    Attributes:
        strings: The stop strings, if any.
        met: The stop string that was found, or "".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.strings = tuple(stops)
        self.met = ""
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that may be printed, up to the first stop string."""
        text = self._held + text
        if hit := self._first(text):
            place, self.met = hit
            self._held = ""
            return text[:place]
        held = max((overlap(text, stop) for stop in self.strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def would_stop(self, text: str) -> bool:
        """Return whether a stop string would be found if `text` were pushed."""
        return self._first(self._held + text) is not None

    def _first(self, text: str) -> tuple[int, str] | None:
        places = [(place, stop) for stop in self.strings if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held
