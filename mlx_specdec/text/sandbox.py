"""The sandbox of chat templates: jinja's, with limits of processor time and of sizes. A template is
a program by a stranger. A single operation, such as `10 ** 10 ** 8`, could run for hours."""

import functools
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import Any

MOST_CHARACTERS, SECONDS = 1 << 24, 5.0
"""Limits of one rendering: characters of the output or of any value, and seconds of processor
time."""
MOST_WORK = 1 << 30
"""Limit of the characters and items of all results of a rendering together."""
MOST_BITS = 1 << 16
"""Limit of an integer. Any operation on two integers of this size takes less than a second."""
ITEM = 16
"""The number of characters that an item of a list counts as, in addition to its own."""
METER = " meter"
"""A variable that no template can name: the Meter of the rendering."""
_ADDED = ("_loop_vars", "_block_vars")
"""Arguments that jinja adds to calls."""
_SLOW = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Filters for pages of text, which are slow and useless in chat templates."""


class Meter:
    """The time and the sizes of one rendering. All methods raise ValueError beyond a limit."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + SECONDS
        self._work = 0
        # A template cannot change a list. A list that is kept here keeps its id.
        self._sizes: dict[int, tuple[object, int]] = {}

    def tick(self) -> None:
        """Check the time."""
        if time.thread_time() > self._deadline:
            raise ValueError(f"it takes more than {SECONDS:.0f} s of computing")

    def size(self, value: object) -> int:
        """Return the number of characters in a value and all its items. What a list contains twice
        counts twice, as it does when the list is printed."""
        if isinstance(value, str | bytes):
            return _checked(len(value))
        if isinstance(value, int):
            if value.bit_length() > MOST_BITS:
                raise ValueError(f"it makes an integer of more than {MOST_BITS} bits")
            return 1
        if not isinstance(value, Collection):
            return 1
        if found := self._sizes.get(id(value)):
            return found[1]
        size = 0
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            size = _checked(size + ITEM + self.size(item))
        self._sizes[id(value)] = value, size
        return size

    def begin(
        self, estimate: "Estimate | None", values: tuple[Any, ...], names: Mapping[str, Any]
    ) -> None:
        """Check the time, the arguments of a call, and an estimate of its result."""
        self.tick()
        _checked(sum(map(self.size, chain(values, names.values()))))
        if estimate is not None:
            _checked(estimate(self.size, *values, **names))

    def end(self, result: Any) -> Any:
        """Check a result, and return it."""
        self.size(result)
        self._work += len(result) if isinstance(result, Collection) else 1
        _checked(self._work, MOST_WORK)
        return result


def _checked(size: int, most: int = MOST_CHARACTERS) -> int:
    if size > most:
        raise ValueError(f"it makes texts or lists of more than {most} characters")
    return size


Size = Callable[[object], int]
Estimate = Callable[..., int]
"""Returns an upper bound of the size of a result that can be larger than the arguments. It takes
Meter.size and the arguments. The first argument of a method is its object."""


def _numbers(values: Collection[Any]) -> list[int]:
    return [abs(number) for number in values if isinstance(number, int)]


def _width(size: Size, value: Any, /, *given: Any, **names: Any) -> int:
    return max(_numbers((*given, *names.values())), default=0)


def _repeated(size: Size, value: Any, /, *given: Any, **names: Any) -> int:
    given = (*given, *names.values())
    return len(value) * max([*_numbers(given), *map(size, given), 8])


def _replaced(size: Size, value: Any, /, old: Any, new: Any, *count: Any, **names: Any) -> int:
    old, new = (each if isinstance(each, bytes) else str(each) for each in (old, new))
    return (value if isinstance(value, bytes) else str(value)).count(old) * len(new)


def _formatted(size: Size, form: Any, /, *given: Any, **names: Any) -> int:
    """Return the sum of all widths and precisions, and the largest argument for each field."""
    given, form = (*given, *names.values()), str(form)
    widths = sum(map(int, re.findall(r"\d+", form)))
    if "*" in form or re.search(r"\{[^{}]+\{", form):  # an argument can be a width
        widths += sum(_numbers(given))
    return widths + (form.count("%") + form.count("{")) * max(map(size, given), default=0)


def _joined(size: Size, values: Any, /, separator: Any = "", *attribute: Any, **names: Any) -> int:
    return len(values) * len(str(names.get("d", separator)))


def _summed(size: Size, values: Any, /, *attribute: Any, **names: Any) -> int:
    # A sum of lists copies the sum so far for each of them.
    start = names.get("start", attribute[-1] if attribute else 0)
    return len(values) * size(values) if isinstance(start, Collection) else 0


_FILTERS: dict[str, Estimate] = {
    **dict.fromkeys(("batch", "center", "slice"), _width),
    "format": _formatted,
    "indent": _repeated,
    "join": _joined,
    "replace": _replaced,
    "round": lambda *values, **names: _width(*values, **names) << 10,
    "sum": _summed,
}
_METHODS: dict[str, Estimate] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _width),
    **dict.fromkeys(("format", "format_map"), _formatted),
    **dict.fromkeys(("expandtabs", "translate"), _repeated),
    "join": lambda size, separator, values: len(values) * len(separator),
    "replace": _replaced,
}


def _operated(size: Size, operator: str, left: Any, right: Any) -> int:
    """Return an upper bound of the size of the result of an operator."""
    if operator == "%" and isinstance(left, str):
        return _formatted(size, left, *(right if isinstance(right, tuple) else (right,)))
    if operator == "*" and isinstance(left, Collection) != isinstance(right, Collection):
        text, count = (left, right) if isinstance(left, Collection) else (right, left)
        return size(text) * sum(_numbers([count]))
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(0, right)
        return 0 if bits <= MOST_BITS else bits + MOST_CHARACTERS
    return 0


def _listed(values: Any) -> Any:
    """Return a list of what an iterator yields. Nothing else tells how much it yields."""
    return list(values) if isinstance(values, Iterator) else values


@functools.cache
def compiler() -> Callable[[str], Any]:
    """Return the function that compiles templates. Their variables must include METER."""
    from jinja2 import nodes, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer

    def called(name: str, *arguments: Any) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), [*arguments], [], None, None)

    class Calls(NodeTransformer):
        """Makes calls of what the sandbox does not see: loops, and texts and lists that are made
        without an operator."""

        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            node.body.insert(0, nodes.ExprStmt(called("passed")))
            if node.test is not None:
                node.test = nodes.And(nodes.Not(called("passed")), node.test)
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return called("concatenated", *node.nodes)

        def visit_List(self, node: Any) -> Any:
            return called("passed", self.generic_visit(node))

        visit_Dict = visit_List

        def visit_Tuple(self, node: Any) -> Any:
            return self.visit_List(node) if node.ctx == "load" else node

    class Environment(ImmutableSandboxedEnvironment):
        """A sandbox that checks the time and sizes at every call, filter and operator."""

        intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

        def _generate(self, source: Any, *rest: Any, **names: Any) -> str:
            return super()._generate(Calls().visit(source), *rest, **names)

        def call(self, context: Any, what: Any, /, *args: Any, **kwargs: Any) -> Any:
            meter = context.parent[METER]
            # The environment wraps str.format.
            method = getattr(what, "__wrapped__", what)
            owner = getattr(method, "__self__", None)
            names = {name: value for name, value in kwargs.items() if name not in _ADDED}
            if isinstance(owner, str | bytes | int) and method.__name__ in _METHODS:
                args = tuple(map(_listed, args))
                meter.begin(_METHODS[method.__name__], (owner, *args), names)
            else:
                meter.begin(None, args, names)
            return meter.end(super().call(context, what, *args, **kwargs))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            meter = context.parent[METER]
            meter.begin(None, (left, right), {})
            _checked(_operated(meter.size, operator, left, right))
            return meter.end(super().call_binop(context, operator, left, right))

        @staticmethod
        def passed(value: Any = None) -> Any:
            return value

        @staticmethod
        def concatenated(*values: Any) -> str:
            return "".join(map(str, values))

    class Attributes(Namespace):
        """jinja's namespace, whose text would contain that of all its values."""

        def __repr__(self) -> str:
            return "<Namespace>"

    @pass_context
    def finalize(context: Any, value: Any) -> Any:
        return context.parent[METER].end(value)

    @pass_context
    def tojson(
        context: Any,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
        if indent is None and separators is None:
            return json.dumps(value, **options)
        meter, pieces, size = context.parent[METER], [], _checked(sum(_numbers([indent])))
        encoder = json.JSONEncoder(**options, indent=indent, separators=separators)
        for piece in encoder.iterencode(value):
            meter.tick()
            size = _checked(size + len(piece))
            pieces.append(piece)
        return "".join(pieces)

    def metered(name: str) -> Any:
        estimate = _FILTERS.get(name)

        @pass_context
        def apply(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            meter, value = context.parent[METER], value if estimate is None else _listed(value)
            meter.begin(estimate, (value, *args), kwargs)
            return meter.end(plain.call_filter(name, value, args, kwargs, context))

        return apply

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    plain = ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = tojson
    for name in _SLOW:
        del plain.filters[name]
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters = {name: metered(name) for name in plain.filters}
    environment.globals |= {"namespace": Attributes, "raise_exception": raise_exception}
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del environment.globals["lipsum"]
    return functools.lru_cache(environment.from_string)
