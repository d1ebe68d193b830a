"""Chat templates that write tool calls as the published templates of each format do: they do the
same with names and values, and are otherwise as short as possible."""

import functools
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

TEMPLATES: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def written(template: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return what the template of this name writes for calls."""
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return _compiled(TEMPLATES[template]).render(calls=listed)


@functools.cache
def _compiled(source: str) -> Template:
    # As transformers compiles templates.
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(source)
