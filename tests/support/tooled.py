"""A tiny Llama whose chat template knows tools and thoughts, as Qwen's does."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from . import tiny
from .tokenizers import byte_level
from .tools import ANTHROPIC as ANTHROPIC
from .tools import GET_TOOLS as GET_TOOLS
from .tools import KEY as KEY
from .tools import MODEL as MODEL
from .tools import NAMED as NAMED
from .tools import SCHEMA as SCHEMA
from .tools import TOOLS as TOOLS
from .tools import function as function

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
    """special: whether its marks are tokens that are never printed."""
    byte_level(directory, chat_template=template)
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    added = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    tokenizer.save(file)
    tiny.write("llama", directory, 0, vocab_size=tokenizer.get_vocab_size())
    return directory
