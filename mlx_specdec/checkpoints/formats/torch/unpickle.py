"""The pickles that torch.save writes, read so that they can build plain values and nothing else.

Knows the binary operations of pickle protocols 2 to 5. Imports nothing on a pickle's word: a name
is looked up in the table that the caller hands over, and one that is not in it ends the reading.
Operations that could reach Python's own objects (INST, OBJ, NEWOBJ, EXT) are not there at all.
Work and memory are bounded by `pickle_machine`, whatever a pickle claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .objects import UNREAD
from .pickle_machine import LONGEST_INTEGER, Buffer, Constructor, Machine, Refused, as_text

PROTOCOLS = range(2, 6)


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
    return Machine(data, begin, admitted, persistent).run(OPERATIONS)


def _proto(machine: Machine) -> None:
    version = machine.number("B")
    if version not in PROTOCOLS:
        raise Refused(f"is written with pickle protocol {version}: not read here")


def _frame(machine: Machine) -> None:
    machine.take(8)


def _mark(machine: Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_mark()


def _pop_to_mark(machine: Machine) -> None:
    machine.pop_mark()


def _push(make: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        value = make(machine)  # before `stack` is looked up: it may take away a mark
        machine.stack.append(value)

    return operation


def _tuple(count: int) -> Callable[[Machine], None]:
    return _push(lambda machine: machine.pop_many(count))


def _long(machine: Machine) -> int:
    size = machine.number("<B")
    if size > LONGEST_INTEGER:
        raise Refused(f"is refused: its pickle holds a number of {size} bytes")
    return int.from_bytes(machine.take(size), "little", signed=True)


def _dict(machine: Machine) -> dict[Any, Any]:
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


def _set_item(machine: Machine) -> None:
    values = machine.pop_many(2)
    _fill(machine.top(dict), list(values))


def _set_items(machine: Machine) -> None:
    values = machine.pop_mark()
    _fill(machine.top(dict), values)


def _append(machine: Machine) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _appends(machine: Machine) -> None:
    values = machine.pop_mark()
    machine.top(list).extend(values)


def _put(form: str) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        place = machine.number(form)
        machine.memo[place] = _last(machine)

    return operation


def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = _last(machine)


def _last(machine: Machine) -> Any:
    if not machine.stack:
        raise Refused("is damaged: its pickle takes a value that is not there")
    return machine.stack[-1]


def _get(form: str) -> Callable[[Machine], None]:
    def make(machine: Machine) -> Any:
        place = machine.number(form)
        if place not in machine.memo:
            raise Refused("is damaged: its pickle refers to a value that is not there")
        return machine.memo[place]

    return _push(make)


def _global(machine: Machine) -> Any:
    return _admit(machine, machine.line(), machine.line())


def _stack_global(machine: Machine) -> Any:
    module, name = machine.pop_many(2)
    return _admit(machine, module, name)


def _admit(machine: Machine, module: Any, name: Any) -> Any:
    if not isinstance(module, str) or not isinstance(name, str):
        raise Refused("is damaged: its pickle asks for something by what is no name")
    if (module, name) not in machine.admitted:
        if module == "torch" and name in UNREAD:
            raise Refused(f"holds tensors of the type {UNREAD[name]}, which is not read here")
        shown = ascii(f"{module}.{name}")[1:-1]
        raise Refused(
            f"is refused: it asks for {shown:.120}, and weights need nothing of the kind (it may "
            "be malicious, or no plain state dict)"
        )
    return machine.admitted[module, name]


def _reduce(machine: Machine) -> Any:
    constructor, arguments = machine.pop_many(2)
    if not isinstance(constructor, Constructor) or type(arguments) is not tuple:
        raise Refused("is damaged: its pickle calls what cannot be called")
    # One list may be handed to many calls, each of which may copy it.
    machine.spend(sum(len(each) for each in arguments if isinstance(each, (list, tuple))))
    return constructor.call(arguments)


def _build(machine: Machine) -> None:
    """The state of an object: only dictionaries get one, their metadata, which nobody needs."""
    state = machine.pop()
    machine.top(dict)
    if not isinstance(state, dict):
        raise Refused("is damaged: its pickle sets the state of an object")


def _persistent(machine: Machine) -> Any:
    return machine.persistent(machine.pop())


OPERATIONS: Mapping[int, Callable[[Machine], None]] = {
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
    ord("X"): _push(lambda machine: as_text(machine.sized("<I"))),
    0x8C: _push(lambda machine: as_text(machine.sized("<B"))),
    0x8D: _push(lambda machine: as_text(machine.sized("<Q"))),
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
