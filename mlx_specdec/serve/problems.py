"""Errors of requests, in OpenAI's format: a status and {"error": {...}}. Clients repeat a request
after 429 and 5xx, so a request that must be changed gets 400."""

from collections.abc import Mapping

from starlette.exceptions import HTTPException

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


class Problem(HTTPException):
    """An error response. param: The name of the wrong field. code: A name of the error for
    programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        return ERROR_TYPES.get(self.status, "invalid_request_error")


def invalid(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """Return the error for a request that the client has to change."""
    return Problem(400, message, param=param, code=code)


def too_long(
    param: str, tokens: int | str, most: int, longest: int, advice: str = "shorten it"
) -> Problem:
    """Return the error for a text that does not fit.

    Args:
        param: The field with the text.
        tokens: Number of tokens of the text.
        most: Largest number of tokens of such a text.
        longest: Largest number of tokens of a prompt and its completion together.
    """
    what = "prompt" if param == "messages" else param
    message = f"{what} is too long: {tokens} tokens > {most} maximum"
    return beyond(message, longest, advice, param)


def beyond(words: str, longest: int, advice: str, param: str) -> Problem:
    """Return the error for a request that does not fit the context. Agents shorten a conversation
    if they find Anthropic's words or OpenAI's, so every API has both. words: Anthropic's."""
    context = f"this model's maximum context length is {longest} tokens"
    return invalid(
        f"{words}; {context}, with the completion: {advice}", param, "context_length_exceeded"
    )


def unsupported(param: str, message: str = "") -> Problem:
    """Return the error for a field that this server cannot honour."""
    default = f"{param} is not supported by this server: leave it out"
    return invalid(message or default, param, "unsupported_parameter")


def busy(message: str, status: int = 503, code: str | None = None, seconds: int = 1) -> Problem:
    """Return the error for a request that may succeed some seconds later."""
    return Problem(status, message, code=code, headers={"Retry-After": str(seconds)})


def failed(message: str) -> Problem:
    """Return the error for a request that would fail again if it were repeated."""
    return Problem(500, message, headers={"x-should-retry": "false"})
