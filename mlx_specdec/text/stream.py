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
    """Incremental decoding. Text that later tokens may still change is held back. shown: special
    ids that are part of the text, with what they write there."""

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._shown = shown or {}
        self._bytes = _byte_pieces(tokenizer)
        self._window: list[int] = []
        self._printed = 0

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
        text = self._tokenizer.decode(self._window)
        certain = len(text.rstrip(INCOMPLETE))
        new = text[self._printed : certain]
        self._printed = max(self._printed, certain)
        if certain == len(text) and len(self._window) > LONGEST_WINDOW:
            # A few printed tokens stay, since the first of a text loses its leading space.
            self._window = self._window[-KEPT_WINDOW:]
            self._printed = len(self._tokenizer.decode(self._window))
        return new

    def pending(self) -> str:
        """Return what a run of byte pieces would write if it ended here; "" within a character."""
        if not self._window or self._window[-1] not in self._bytes:
            return ""
        text = self._tokenizer.decode(self._window)
        return "" if text.endswith(INCOMPLETE) else text[self._printed :]

    def finish(self) -> str:
        text = self._tokenizer.decode(self._window) if self._window else ""
        rest = text[self._printed :]
        self._window, self._printed = [], 0
        return rest


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


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
