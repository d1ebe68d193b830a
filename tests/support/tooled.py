"""A tiny Llama whose chat template knows tools and thoughts, as Qwen's does."""

from collections.abc import Sequence
from pathlib import Path

from ..contract.support import checkpoint

CALLS = ("<tool_call>", "</tool_call>")
MARKS = ("<think>", "</think>", *CALLS)
TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %} {{ tool.function.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    '<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def make_tooled(
    directory: Path,
    *,
    template: str = TEMPLATE,
    special: bool = False,
    marks: Sequence[str] = MARKS,
) -> Path:
    """Write the model. special: Whether its marks are tokens that are never printed."""
    return checkpoint(directory, template=template, tokens=tuple(marks), special=special)
