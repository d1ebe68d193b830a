"""The pickles that torch.save writes, read so that they can build plain values and nothing else.

Python's own unpickler reads them, the one written in Python: `pickle._Unpickler` is private by its
name, but has been there since Python 3.0. Its table of operations is cut to what torch writes; a
name is looked up among those that the caller admits, never imported; work and memory are bounded.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from ...tensors import Malformed

PROTOCOLS = range(2, 6)
MOST_READS = 2_000_000
"""Of operations and their arguments, about 60 a tensor, so 30,000 tensors in a file; each leaves at
most some 100 bytes."""
LONGEST_PICKLE = 1 << 26
LONGEST_TEXT = 1 << 20
LONGEST_NAME = 200
LONGEST_INTEGER = 16
_DAMAGED = "is truncated or damaged in its pickle: download it again"
_PLAIN = (str, int, float, bytes, type(None))
_ADMITTED = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL "
    "STACK_GLOBAL REDUCE BUILD BINPERSID"
)

Table = Mapping[tuple[str, str], Any]
"""(module, name) -> what it stands for: a function that checks its arguments, or a value."""


def load(
    data: bytes | mmap.mmap, begin: int, admitted: Table, persistent: Callable[[Any], Any]
) -> tuple[Any, int]:
    """The value of the pickle that begins at `begin`, and where it ends.

    persistent: what a persistent id stands for. The value consists of None, bool, int, float, str,
    bytes, list, tuple, dict and of what `admitted` and `persistent` give. Raises Malformed.
    """
    source = _Source(data, begin)
    unpickler = _Unpickler(source, admitted, persistent)
    try:
        value = unpickler.load()
    except (pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError):
        raise Malformed(_DAMAGED) from None
    if unpickler.stack or unpickler.metastack:
        raise Malformed("is damaged: its pickle ends in the middle of a value")
    return value, source.at


class _Source:
    """A pickle's bytes as the unpickler asks for them, within limits."""

    def __init__(self, data: bytes | mmap.mmap, begin: int) -> None:
        self._data, self.at, self._end = data, begin, min(len(data), begin + LONGEST_PICKLE)
        self._left = MOST_READS

    def spend(self, work: int) -> None:
        """Count work done, in reads or in elements copied."""
        self._left -= work
        if self._left < 0:
            raise Malformed(f"is refused: its pickle has more than {MOST_READS:,} operations")

    def read(self, size: int) -> bytes:
        self.spend(1)
        if size > LONGEST_TEXT:
            raise Malformed(f"is refused: its pickle holds a text of {size:,} bytes")
        if size > self._end - self.at:
            raise Malformed(_DAMAGED)
        self.at += size
        return self._data[self.at - size : self.at]

    def readline(self) -> bytes:
        stop = self._data.find(b"\n", self.at, self.at + LONGEST_NAME + 1)
        return self.read(stop + 1 - self.at if stop >= 0 else LONGEST_PICKLE)


class _Unpickler(pickle._Unpickler):
    """`stack` has the values since the last mark, `metastack` those below it."""

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, source: _Source, admitted: Table, persistent: Callable[[Any], Any]) -> None:
        super().__init__(source, encoding="latin-1")  # Python 2's texts are bytes
        self._source, self._admitted, self._persistent = source, admitted, persistent

    def find_class(self, module: str, name: str) -> Any:
        return self._admitted[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)

    def load_proto(self) -> None:
        version = self.read(1)[0]
        if version not in PROTOCOLS:
            raise Malformed(f"is written with pickle protocol {version}: not read here")

    def load_frame(self) -> None:
        self.read(8)  # how much to read at once; here all is at hand

    def load_long1(self) -> None:
        size = self.read(1)[0]
        if size > LONGEST_INTEGER:
            raise Malformed(f"is refused: its pickle holds a number of {size} bytes")
        self.append(pickle.decode_long(self.read(size)))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._fill(items)

    def load_setitem(self) -> None:
        items = self.stack[-2:]
        del self.stack[-2:]
        self._fill(items)

    def load_setitems(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, items: list[Any]) -> None:
        # Hashing a deeply nested tuple would overrun the interpreter's own stack.
        if not all(isinstance(key, _PLAIN) for key in items[::2]):
            raise Malformed("is refused: its pickle has a dictionary key that is no plain value")
        if type(self.stack[-1]) is not dict:
            raise Malformed(_DAMAGED)
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def load_build(self) -> None:
        """The state of an object: only dictionaries get one, their metadata, which nobody needs."""
        if not (isinstance(self.stack.pop(), dict) and type(self.stack[-1]) is dict):
            raise Malformed("is damaged: its pickle sets the state of an object")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            raise Malformed(_DAMAGED)
        # One list may be handed to many calls, each of which may copy it.
        self._source.spend(sum(len(each) for each in arguments if isinstance(each, list | tuple)))
        self.stack[-1] = self.stack[-1](*arguments)


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        import pickletools

        names = {each.code: each.name for each in pickletools.opcodes}
        name = names.get(chr(code), f"0x{code:02x}")
        raise Malformed(f"uses the pickle operation {name}: not read here")


def _admitted_operations() -> _Operations:
    codes = [getattr(pickle, name)[0] for name in _ADMITTED.split()]
    whole = pickle._Unpickler.dispatch
    return _Operations({code: getattr(_Unpickler, whole[code].__name__) for code in codes})


_Unpickler.dispatch = _admitted_operations()
