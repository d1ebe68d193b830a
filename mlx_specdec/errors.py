"""The errors of this package. Every message is written for the user: one line names what is wrong
and what to do about it. The command line catches SpecdecError in one place and exits with 2."""

from collections.abc import Collection


class SpecdecError(Exception):
    """Base of every error that this package raises on purpose."""


class OptionError(SpecdecError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class SourceError(SpecdecError):
    """A model name or directory cannot be turned into local files."""


class CheckpointError(SpecdecError):
    """A checkpoint is damaged, incomplete or of a kind that is not supported."""


class OutputError(SpecdecError):
    """A result cannot be written to its destination."""


class PromptError(SpecdecError, ValueError):
    """The prompt is empty or longer than the model can take."""


class DocumentError(SpecdecError):
    """A document to search is missing, empty, too large or no text."""


class VocabularyError(SpecdecError):
    """Target and draft model do not share one vocabulary."""


class DecodingError(SpecdecError):
    """Decoding cannot go on: a step was interrupted, or a model's numbers are damaged."""


class RewindError(SpecdecError):
    """A context cannot forget tokens that it should rewind."""


def check_one_of(name: str, value: object, known: Collection[object]) -> None:
    """Raise OptionError for a value of the setting `name` that is not `known`."""
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(map(str, known))}, not {value!r}")


DAMAGED = (
    "the model's logits are not numbers (NaN or infinite): its weights are damaged, or its "
    "precision is too low for them; try --dtype float32"
)
NO_MEMORY = "the memory does not suffice: give less at once, or take a smaller model"
_DEVICE_PROBLEMS = {
    "malloc]": NO_MEMORY,
    "Insufficient Memory": NO_MEMORY,
    "OutOfMemory": NO_MEMORY,
    "Caused GPU Timeout Error": "the GPU stopped a pass that took too long: take a smaller "
    "prefill-step-size, or a smaller model",
    "Impacting Interactivity": "macOS stopped a pass that kept the screen waiting for the GPU: "
    "take a smaller prefill-step-size, or close other programs that use the GPU",
}
"""Part of MLX's message when the device has failed -> the message for the user. MLX writes [malloc]
for a CPU, and [metal::malloc] or "[METAL] Command buffer execution failed" for a GPU."""


def device_problem(problem: BaseException) -> str:
    """Return a line for the user if memory has ended or the GPU has given up, otherwise ""."""
    if isinstance(problem, MemoryError):
        return NO_MEMORY
    said = str(problem)
    return next((line for part, line in _DEVICE_PROBLEMS.items() if part in said), "")


def message(problem: BaseException) -> str:
    """Return the line for the user: of an error of ours, or of a failed device; otherwise ""."""
    return str(problem) if isinstance(problem, SpecdecError) else device_problem(problem)


def is_panic(problem: BaseException) -> bool:
    """Return whether a library in Rust has panicked; pyo3's PanicException is no Exception."""
    return type(problem).__name__ == "PanicException"


def first_line(problem: BaseException) -> str:
    """Return the first line of an exception's message, or its class name where that is empty."""
    lines = (line.strip() for line in str(problem).splitlines())
    return next(filter(None, lines), type(problem).__name__)
