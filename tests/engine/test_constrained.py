"""A panic of the grammar's library ends its own completion alone."""

import pytest

from mlx_specdec.core.constraint import Constraint
from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.generate import generate, stream_many
from mlx_specdec.results import STUCK

from ..support.letters import bound

PROMPT = [5, 9, 12, 7, 25, 21, 8]


def make_options(seed: int, **changes) -> Options:
    return Options(**{"max_tokens": 44, "seed": seed, "cost_cache": False, **changes})


class Panics:
    """A matcher of llguidance whose named function panics at its third call."""

    class PanicException(BaseException):
        """As pyo3's."""

    def __init__(self, matcher: object, name: str) -> None:
        self._matcher = matcher
        self._name = name
        self._calls = 0

    def __getattr__(self, name: str) -> object:
        shipped = getattr(self._matcher, name)

        def counted(*arguments: object) -> object:
            self._calls += name == self._name
            if name == self._name and self._calls == 3:
                raise Panics.PanicException("index out of bounds")
            return shipped(*arguments)

        return counted


@pytest.mark.parametrize("name", ["compute_bitmask", "validate_tokens", "try_consume_tokens"])
def test_a_panic_of_the_library_ends_its_own_text(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair, init = bound("llama"), Constraint.__init__

    def panics(self: Constraint, *arguments: object) -> None:
        init(self, *arguments)
        self._matcher = Panics(self._matcher, name)

    free = make_options(1, num_draft=2, max_tokens=9)
    requests = [
        Request(PROMPT, make_options(0, regex="[abc]{20}", num_draft=2)),
        Request(PROMPT, free),
    ]
    alone = generate(pair, PROMPT, free).text
    monkeypatch.setattr(Constraint, "__init__", panics)
    parts = [part for part in stream_many(pair, requests, free, batch_size=2) if part.last]
    assert {part.number: part.error for part in parts} == {0: STUCK, 1: None}
    assert [part.result.text for part in parts if part.result is not None] == [alone]
