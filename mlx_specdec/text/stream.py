"""Token ids -> printable text while they come, and stop strings that may straddle pushes. The
pieces add up to what decoding all ids at once gives; each push decodes a window of them."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from .tokenizer import BYTE, Tokenizer

INCOMPLETE = "\ufffd"
LONGEST_WINDOW = 24
KEPT_WINDOW = 6
_byte_ids: WeakKeyDictionary[Tokenizer, frozenset[int]] = WeakKeyDictionary()


class TextStream:
    """Incremental decoding. Text that later tokens may still change is held back.

    Args:
        shown: Special ids that are part of the text, with what they write there.
        before: Ids that the text continues. Without them, many tokenizers leave out the blank
            before the first word."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        shown: Mapping[int, str] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._shown = shown or {}
        self._bytes = _byte_pieces(tokenizer)
        self._window = self._end_of(before)
        # The text of `before`, until something has been printed after it.
        self._before = tokenizer.decode(self._window) if self._window else ""
        self._printed = len(self._before)

    def _end_of(self, ids: Sequence[int]) -> list[int]:
        """Return the last KEPT_WINDOW ids that are printed, from before a run of byte pieces on."""
        window: list[int] = []
        for id in reversed(ids):
            if len(window) >= KEPT_WINDOW and window[-1] not in self._bytes:
                break
            if id not in self._special:
                window.append(id)
        return window[::-1]

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain with `ids`; often "" in the middle of a character."""
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
            # A few printed tokens stay, since the first of a text loses its leading space.
            self._before, self._window = "", self._window[-KEPT_WINDOW:]
            self._printed = len(self._tokenizer.decode(self._window))
        return new

    def pending(self) -> str:
        """Return what a run of byte pieces would write if it ended here; "" within a character."""
        if not self._window or self._window[-1] not in self._bytes:
            return ""
        text, printed = self._decode()
        return "" if text.endswith(INCOMPLETE) else text[printed:]

    def finish(self) -> str:
        text, printed = self._decode() if self._window else ("", 0)
        self._before, self._window, self._printed = "", [], 0
        return text[printed:]

    def _decode(self) -> tuple[str, int]:
        """Return the text of the window, and how many of its characters have been printed."""
        text = self._tokenizer.decode(self._window)
        if text.startswith(self._before):
            return text, self._printed
        # The new tokens complete a character of which `before` has the first bytes.
        return text, common(self._before, text)


def _byte_pieces(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of single bytes. Runs of them are decoded as one: right or wrong as a whole."""
    if tokenizer not in _byte_ids:
        # Once a tokenizer: a server begins many texts, and vocabularies are large.
        _byte_ids[tokenizer] = frozenset(
            id
            for id, piece in enumerate(tokenizer.pieces())
            if piece is not None and BYTE.fullmatch(piece)
        )
    return _byte_ids[tokenizer]


class StopStrings:
    """Finds strings that end the text, and holds back what may be the beginning of one. stops: one
    or more, none of them empty. met: the one that was found, "" before."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.met = ""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be printed, and whether a stop string cut it."""
        text = self._held + text
        if hit := self._first(text):
            place, self.met = hit
            self._held = ""
            return text[:place], True
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def would_stop(self, text: str) -> bool:
        """Return whether a stop string would be found if `text` were pushed."""
        return self._first(self._held + text) is not None

    def _first(self, text: str) -> tuple[int, str] | None:
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def common(text: str, second: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    pairs = enumerate(zip(text, second, strict=False))
    shorter = min(len(text), len(second))
    return next((at for at, (mine, yours) in pairs if mine != yours), shorter)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
