"""How a loaded pair reads the messages of a chat."""

from ..core.options import Options
from ..text.messages import ChatFormat, Way
from .pair import Pair
from .request import encode


def chat_format(pair: Pair, options: Options) -> ChatFormat:
    """Return the format in which the target model reads messages.

    Args:
        pair: The loaded models.
        options: Whether the chat template is used, its variables, and the system prompt.
    """
    way: Way = "role prefixes"
    if pair.target.kind == "encoder-decoder":
        way = "single user message"
    elif options.chat_template and pair.tokenizer.has_chat_template:
        way = "template"
    return ChatFormat(
        pair.tokenizer,
        way,
        lambda text: encode(pair, text, options),
        options.system_prompt,
        options.chat_template_config,
    )
