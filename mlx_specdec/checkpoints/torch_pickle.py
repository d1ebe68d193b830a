"""A machine for the pickles that torch.save writes, which can build plain values and nothing else.

Knows the binary operations of pickle protocols 2 to 5. Imports nothing on a pickle's word: a name
is looked up in the table that the caller hands over, and one that is not in it ends the reading.
Operations that could reach Python's own objects (INST, OBJ, NEWOBJ, EXT) are not there at all.
Work and memory are bounded by LIMITS below, whatever a pickle claims.
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
PROTOCOLS = range(2, 6)

Buffer = Any
"""bytes or an mmap: has a length, and its slices are bytes."""


class Refused(Exception):
    """What is wrong with a pickle, as the rest of a sentence that begins with the file's name."""


@dataclass(frozen=True)
class Constructor:
    """A name that a pickle may call. `call` gets the arguments and checks them itself."""

    name: str
    call: Callable[[tuple[Any, ...]], Any]


def load(
    data: Buffer,
    begin: int,
    admitted: Mapping[tuple[str, str], Any],
    persistent: Callable[[Any], Any],
) -> tuple[Any, int]:
    """The value of the pickle that begins at `begin`, and where it ends.

    admitted: (module, name) -> a Constructor, or a value as it is. persistent: what a persistent
    id stands for. The value consists of None, bool, int, float, str, bytes, list, tuple, dict and
    of what `admitted` and `persistent` give. Raises Refused.
    """
    return _Machine(data, begin, admitted, persistent).run()


class _Machine:
    """A stack, a memo and a position in the data."""

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

    def run(self) -> tuple[Any, int]:
        while True:
            self.spend(1)
            code = self.take(1)[0]
            if code == STOP:
                if len(self.stack) != 1 or self.below:
                    raise Refused("is damaged: its pickle ends in the middle of a value")
                return self.stack[0], self.at
            operation = OPERATIONS.get(code)
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
        return _text(text)

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


def _proto(machine: _Machine) -> None:
    version = machine.number("B")
    if version not in PROTOCOLS:
        raise Refused(f"is written with pickle protocol {version}: not read here")


def _frame(machine: _Machine) -> None:
    machine.take(8)


def _mark(machine: _Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _pop_to_mark(machine: _Machine) -> None:
    machine.pop_mark()


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        value = make(machine)  # before `stack` is looked up: it may take away a mark
        machine.stack.append(value)

    return operation


def _tuple(count: int) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.pop_many(count))


def _long(machine: _Machine) -> int:
    size = machine.number("<B")
    if size > LONGEST_INTEGER:
        raise Refused(f"is refused: its pickle holds a number of {size} bytes")
    return int.from_bytes(machine.take(size), "little", signed=True)


def _dict(machine: _Machine) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    _fill(result, machine.pop_mark())
    return result


def _fill(target: dict[Any, Any], values: list[Any]) -> None:
    if len(values) % 2:
        raise Refused("is damaged: its pickle has a key without a value")
    for key, value in zip(values[::2], values[1::2], strict=True):
        # Hashing a deeply nested tuple would overrun the interpreter's own stack.
        if not isinstance(key, (str, int, float, bytes, type(None))):
            raise Refused("is refused: its pickle has a dictionary key that is no plain value")
        target[key] = value


def _set_item(machine: _Machine) -> None:
    values = machine.pop_many(2)
    _fill(machine.top(dict), list(values))


def _set_items(machine: _Machine) -> None:
    values = machine.pop_mark()
    _fill(machine.top(dict), values)


def _append(machine: _Machine) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.pop_mark()
    machine.top(list).extend(values)


def _put(form: str) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        place = machine.number(form)
        machine.memo[place] = _last(machine)

    return operation


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = _last(machine)


def _last(machine: _Machine) -> Any:
    if not machine.stack:
        raise Refused("is damaged: its pickle takes a value that is not there")
    return machine.stack[-1]


def _get(form: str) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> Any:
        place = machine.number(form)
        if place not in machine.memo:
            raise Refused("is damaged: its pickle refers to a value that is not there")
        return machine.memo[place]

    return _push(make)


def _global(machine: _Machine) -> Any:
    return _admit(machine, machine.line(), machine.line())


def _stack_global(machine: _Machine) -> Any:
    module, name = machine.pop_many(2)
    return _admit(machine, module, name)


def _admit(machine: _Machine, module: Any, name: Any) -> Any:
    if not isinstance(module, str) or not isinstance(name, str):
        raise Refused("is damaged: its pickle asks for something by what is no name")
    if (module, name) not in machine.admitted:
        shown = ascii(f"{module}.{name}")[1:-1]
        raise Refused(
            f"is refused: it asks for {shown:.120}, and weights need nothing of the kind (it may "
            "be malicious, or no plain state dict)"
        )
    return machine.admitted[module, name]


def _reduce(machine: _Machine) -> Any:
    constructor, arguments = machine.pop_many(2)
    if not isinstance(constructor, Constructor) or type(arguments) is not tuple:
        raise Refused("is damaged: its pickle calls what cannot be called")
    # One list may be handed to many calls, each of which may copy it.
    machine.spend(sum(len(each) for each in arguments if isinstance(each, (list, tuple))))
    return constructor.call(arguments)


def _build(machine: _Machine) -> None:
    """The state of an object: only dictionaries get one, their metadata, which nobody needs."""
    state = machine.pop()
    machine.top(dict)
    if not isinstance(state, dict):
        raise Refused("is damaged: its pickle sets the state of an object")


def _persistent(machine: _Machine) -> Any:
    return machine.persistent(machine.pop())


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Refused("is damaged: its pickle holds a text that is none") from None


def _operation_name(code: int) -> str:
    import pickletools

    names = {operation.code: operation.name for operation in pickletools.opcodes}
    return names.get(chr(code), f"0x{code:02x}")


STOP = ord(".")
OPERATIONS: Mapping[int, Callable[[_Machine], None]] = {
    0x80: _proto,
    0x95: _frame,
    ord("("): _mark,
    ord("0"): _pop,
    ord("1"): _pop_to_mark,
    ord("2"): _push(_last),
    ord("N"): _push(lambda machine: None),
    0x88: _push(lambda machine: True),
    0x89: _push(lambda machine: False),
    ord("J"): _push(lambda machine: machine.number("<i")),
    ord("K"): _push(lambda machine: machine.number("<B")),
    ord("M"): _push(lambda machine: machine.number("<H")),
    0x8A: _push(_long),
    ord("G"): _push(lambda machine: machine.number(">d")),
    ord("X"): _push(lambda machine: _text(machine.sized("<I"))),
    0x8C: _push(lambda machine: _text(machine.sized("<B"))),
    0x8D: _push(lambda machine: _text(machine.sized("<Q"))),
    # Written by Python 2, whose texts are bytes.
    ord("T"): _push(lambda machine: machine.sized("<i").decode("latin-1")),
    ord("U"): _push(lambda machine: machine.sized("<B").decode("latin-1")),
    ord("B"): _push(lambda machine: machine.sized("<I")),
    ord("C"): _push(lambda machine: machine.sized("<B")),
    0x8E: _push(lambda machine: machine.sized("<Q")),
    ord("]"): _push(lambda machine: []),
    ord("l"): _push(lambda machine: machine.pop_mark()),
    ord("a"): _append,
    ord("e"): _appends,
    ord("}"): _push(lambda machine: {}),
    ord("d"): _push(_dict),
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord(")"): _push(lambda machine: ()),
    ord("t"): _push(lambda machine: tuple(machine.pop_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("q"): _put("<B"),
    ord("r"): _put("<I"),
    0x94: _memoize,
    ord("h"): _get("<B"),
    ord("j"): _get("<I"),
    ord("c"): _push(_global),
    0x93: _push(_stack_global),
    ord("R"): _push(_reduce),
    ord("b"): _build,
    ord("Q"): _push(_persistent),
}
