"""Contents of messages, and the reasoning of earlier messages, in request bodies."""

from typing import Annotated, Any, Literal

from .bodies import ByType, Fields, String


class TextPart(Fields):
    type: Literal["text", "input_text", "output_text", "summary_text", "reasoning_text"]
    text: String


class RefusalPart(Fields):
    type: Literal["refusal"]
    refusal: String


class ThinkingPart(Fields):
    type: Literal["thinking"]
    thinking: String | list[TextPart] | None = None


class Other(Fields):
    """A part, an item or a tool of an unknown type."""

    type: String


CONTENT_PARTS = (TextPart, RefusalPart, ThinkingPart)
Part = Annotated[
    Any,
    ByType(
        *CONTENT_PARTS,
        fallback=Other,
        words='a part with a type, such as {"type": "text", "text": ...}',
    ),
]
Content = String | list[Part]


class ReasoningDetail(Fields):
    """A part of the reasoning in OpenRouter's format."""

    text: String | None = None
    summary: String | None = None


class Reasoned(Fields):
    """The fields in which clients send the reasoning of earlier messages."""

    reasoning_content: String | None = None
    reasoning: String | None = None
    thinking: String | None = None
    reasoning_details: list[ReasoningDetail] | None = None
