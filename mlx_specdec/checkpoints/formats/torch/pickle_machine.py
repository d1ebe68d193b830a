"""A stack, a memo and a position in a pickle: what a pickle's operations work on, within limits.

Knows how values are taken from the data and from the stack, and how much of each is allowed,
whatever the pickle claims. Knows no operation but the last (STOP); `torch_pickle` has the others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_OPERATIONS = 2_000_000
"""About 40 a tensor; each holds at most some 100 bytes."""
LONGEST_PICKLE = 1 << 26
LONGEST_TEXT = 1 << 20
LONGEST_NAME = 200
LONGEST_INTEGER = 16

Buffer = Any
"""bytes or an mmap: has a length, and its slices are bytes."""


class Refused(Exception):
    """What is wrong with a pickle, as the rest of a sentence that begins with the file's name."""


@dataclass(frozen=True)
class Constructor:
    """A name that a pickle may call. `call` gets the arguments and checks them itself."""

    name: str
    call: Callable[[tuple[Any, ...]], Any]


class Machine:
    """One pickle being read. Operations work on `stack` and `memo`; `below` are the stacks under
    the marks; `end` is where the pickle has to end; `left` is the work that is still allowed."""

    def __init__(
        self,
        data: Buffer,
        begin: int,
        admitted: Mapping[tuple[str, str], Any],
        persistent: Callable[[Any], Any],
    ) -> None:
        self.data, self.at, self.end = data, begin, min(len(data), begin + LONGEST_PICKLE)
        self.left = MOST_OPERATIONS
        self.admitted, self.persistent = admitted, persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, operations: Mapping[int, Callable[[Machine], None]]) -> tuple[Any, int]:
        """The pickle's value, and where it ends. Raises Refused."""
        while True:
            self.spend(1)
            code = self.take(1)[0]
            if code == ord("."):
                if len(self.stack) != 1 or self.below:
                    raise Refused("is damaged: its pickle ends in the middle of a value")
                return self.stack[0], self.at
            operation = operations.get(code)
            if operation is None:
                raise Refused(f"uses the pickle operation {_operation_name(code)}: not read here")
            operation(self)

    def spend(self, work: int) -> None:
        """Count work done, in operations or in elements copied by one."""
        self.left -= work
        if self.left < 0:
            raise Refused(f"is refused: its pickle has more than {MOST_OPERATIONS:,} operations")

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > self.end - self.at:
            raise Refused("is truncated or damaged in its pickle")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        """The next number, in the form that `struct` names."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def sized(self, form: str) -> bytes:
        """The next bytes, whose count is written before them."""
        count = self.number(form)
        if not 0 <= count <= LONGEST_TEXT:
            raise Refused(f"is refused: its pickle holds a text of {count:,} bytes")
        return self.take(count)

    def line(self) -> str:
        """Text up to the end of the line."""
        stop = self.data.find(b"\n", self.at, self.at + LONGEST_NAME + 1)
        if stop < 0:
            raise Refused("is truncated or damaged in its pickle")
        text = self.take(stop - self.at)
        self.at += 1
        return as_text(text)

    def pop(self) -> Any:
        if not self.stack:
            raise Refused("is damaged: its pickle takes a value that is not there")
        return self.stack.pop()

    def pop_many(self, count: int) -> tuple[Any, ...]:
        """The last values, in the order in which they came."""
        if count > len(self.stack):
            raise Refused("is damaged: its pickle takes a value that is not there")
        split = len(self.stack) - count
        values = tuple(self.stack[split:])
        del self.stack[split:]
        return values

    def pop_mark(self) -> list[Any]:
        """What came since the last mark."""
        if not self.below:
            raise Refused("is damaged: its pickle lacks a mark")
        values, self.stack = self.stack, self.below.pop()
        return values

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise Refused(f"is damaged: its pickle adds to what is no {kind.__name__}")
        return self.stack[-1]


def as_text(content: bytes) -> str:
    """A pickled text. Raises Refused."""
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Refused("is damaged: its pickle holds a text that is none") from None


def _operation_name(code: int) -> str:
    import pickletools

    names = {operation.code: operation.name for operation in pickletools.opcodes}
    return names.get(chr(code), f"0x{code:02x}")
