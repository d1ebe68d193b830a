"""Models of answers for /openapi.json, as far as clients rely on the answers."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model


def _answer(name: str, **types: Any) -> type[BaseModel]:
    """Return the model of an object that has all of these fields."""
    fields: dict[str, Any] = {field: (kind, ...) for field, kind in types.items()}
    return create_model(name, **fields)


def _several(kind: Any, most: int | None = None) -> Any:
    """Return the type of a list with at least one entry."""
    return Annotated[list[kind], Field(min_length=1, max_length=most)]


CompletionAnswer = _answer(
    "CompletionAnswer",
    id=str,
    model=str,
    object=Literal["chat.completion", "text_completion"],
    created=int,
    choices=_several(
        _answer(
            "CompletionChoice", index=int, finish_reason=Literal["stop", "length", "tool_calls"]
        )
    ),
    usage=_answer("Usage", prompt_tokens=int, completion_tokens=int, total_tokens=int),
)
MessageAnswer = _answer(
    "MessageAnswer",
    id=str,
    model=str,
    stop_reason=str,
    type=Literal["message"],
    role=Literal["assistant"],
    content=list[_answer("MessageBlock", type=str)],  # type: ignore[misc]
    usage=_answer("MessageUsage", input_tokens=int, output_tokens=int),
)
ResponseAnswer = _answer(
    "ResponseAnswer",
    id=str,
    model=str,
    object=Literal["response"],
    status=Literal["completed", "incomplete"],
    output=_several(_answer("OutputItem", id=str, type=str, status=str)),
    usage=_answer("ResponseUsage", input_tokens=int, output_tokens=int, total_tokens=int),
)
CountAnswer = _answer("CountAnswer", input_tokens=int)
GeneratedAnswer = _answer("GeneratedAnswer", generated_text=str)
AnyGenerated = _several(GeneratedAnswer, 1)
TokensAnswer = _answer("TokensAnswer", tokens=list[int], count=int, max_model_len=int)
DetokenizedAnswer = _answer("DetokenizedAnswer", content=str, prompt=str)
ModelAnswer = _answer("ModelAnswer", id=str, object=Literal["model"], created=int, owned_by=str)
Models = _answer("Models", object=Literal["list"], data=_several(ModelAnswer))
EmbeddingsAnswer = _answer(
    "EmbeddingsAnswer",
    object=Literal["list"],
    model=str,
    data=_several(
        _answer("Embedding", object=Literal["embedding"], index=int, embedding=list[float] | str)
    ),
    usage=_answer("EmbeddingsUsage", prompt_tokens=int, total_tokens=int),
)
Anything = dict[str, Any]
ErrorAnswer = _answer("ErrorAnswer", error=_answer("ErrorDetail", message=str, type=str) | str)
