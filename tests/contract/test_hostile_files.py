"""Checkpoints by strangers: whatever they contain, an error names it at once."""

from pathlib import Path

import pytest

from .support import checkpoint, command

DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)
TEMPLATES = {
    "power": "{{ 10 ** (10 ** 8) }}",
    "powers": "{% set n = 2 ** 60000 %}{{ n * n * n }}",
    "product": "{{ 'a' * 10 ** 10 }}",
    "product of a list": "{{ ([1] * 10 ** 10) | length }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "center, folded": "{{ 'a' | center(10000000000) }}",
    "center by map": "{{ ['a'] | map('center', 10 ** 10) | list }}",
    "method": "{{ 'a'.ljust(10 ** 10) }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "format with a width as an argument": "{{ '%*d' | format(10 ** 10, 1) }}",
    "percent": "{{ '%.10000000000f' % 1 }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "str.format with a width as an argument": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "many fields": "{% set x = 'a' * 10 ** 6 %}{{ ('{0}' * 10 ** 6).format(x) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 10) }}",
    "batch": "{{ [1] | batch(10 ** 10, 1) | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "round": "{{ 5 | round(10 ** 10, 'ceil') }}",
    "tojson": "{{ [1] | tojson(indent=10 ** 10) }}",
    "tojson of many": "{{ range(999) | list | tojson(separators=('a' * 10 ** 6, ':')) }}",
    "join": "{{ range(999) | map('string') | join('a' * 10 ** 6) }}",
    "join, as a method": "{{ ('a' * 10 ** 6).join(range(999) | map('string')) }}",
    "replace": "{% set x = 'a' * 10 ** 7 %}{{ x | replace('a', x) }}",
    "sum": "{{ ([[1] * 10 ** 5] * 10 ** 5) | sum(start=[]) }}",
    "lipsum": "{{ lipsum(10 ** 10) }}",
    "doubling by ~": DOUBLING.replace("STEP", "ns.x ~ ns.x"),
    "doubling by +": DOUBLING.replace("STEP", "ns.x + ns.x"),
    "doubling of a list": DOUBLING.replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    "doubling of a dict": DOUBLING.replace("STEP", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "doubling of a macro": (
        "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLING.replace("STEP", "two(ns.x)")
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_would_never_end_is_refused(tmp_path: Path, name: str) -> None:
    model = checkpoint(tmp_path / "model", template=TEMPLATES[name])
    flags = ("--max-tokens", "1", "--temperature", "0")
    command("generate", "--model", model, *flags, "hello").refuses("the chat template cannot be")
