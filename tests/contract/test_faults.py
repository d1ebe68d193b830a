"""What fails hurts nobody else, leaves nothing wrong behind, and is said in one clear error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import (
    DecodingError,
    Options,
    PromptCache,
    Proposal,
    Proposer,
    Request,
    generate,
    load,
    stream_generate,
    stream_many,
)

from .faults import HOWS, PARTS, fail, poison
from .learned import learned
from .support import checkpoint

PROMPT = [3, 17, 40, 21, 9, 33, 12, 5]
OPTIONS = Options(proposer="draft", num_draft=2, cost_cache=False, max_tokens=8, seed=3)
REQUESTS = [
    Request([*PROMPT, 4, 9, 31], replace(OPTIONS, temperature=0.8)),
    Request([*PROMPT, 50, 3], replace(OPTIONS, regular=True, max_tokens=5)),
    Request([*PROMPT, 4, 9, 17, 2], replace(OPTIONS, max_tokens=9)),
    Request([*PROMPT, 11], replace(OPTIONS, temperature=0.8, stop=("7 ",)), top_logprobs=2),
    Request([8, 40, 41], replace(OPTIONS, frequency_penalty=0.5, max_tokens=6)),
]
DAMAGED, BROKEN, MEMORY = "NaN or infinite", "something failed inside", "memory does not suffice"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("faults")
    return load(checkpoint(directory / "target"), checkpoint(directory / "draft", "qwen2"))


@pytest.fixture(scope="module")
def alone(pair: Any) -> list[Any]:
    """Each request decoded by itself, without drafts. What is found out about the models by passes
    of its own is found out here."""
    texts = [generate(pair, one.prompt, replace(one.options, regular=True)) for one in REQUESTS]
    assert decoded(pair, texts) == {}
    return texts


def decoded(pair: Any, alone: list[Any]) -> dict[int, str]:
    """Decode all requests, two at once, and return the errors by request. All other requests write
    what they write alone, and the failed ones the beginning of it."""
    tokens: list[tuple[int, ...]] = [()] * len(REQUESTS)
    texts, ended = [""] * len(REQUESTS), dict[int, str | None]()
    for step in stream_many(pair, REQUESTS, OPTIONS, batch_size=2):
        assert step.number not in ended, "nothing follows the last step"
        tokens[step.number] += step.tokens
        texts[step.number] += step.text
        if step.last:
            ended[step.number] = step.error
            assert step.error is not None or step.result.text == texts[step.number]
    assert len(ended) == len(REQUESTS)
    for number, error in ended.items():
        expected = alone[number]
        if error is None:
            assert (tokens[number], texts[number]) == (expected.tokens, expected.text)
        assert expected.tokens[: len(tokens[number])] == tokens[number]
        assert expected.text.startswith(texts[number])
    return {number: error for number, error in ended.items() if error is not None}


FAULTS: dict[str, tuple[type[BaseException], str]] = {
    "target before": (RuntimeError, BROKEN),
    "target after": (MemoryError, MEMORY),
    "target logits": (ValueError, DAMAGED),
    "target row": (ValueError, DAMAGED),
    "target states": (ValueError, DAMAGED),
    "proposer before": (MemoryError, MEMORY),
    "proposer after": (RuntimeError, BROKEN),
    "proposer logits": (ValueError, ""),
    "proposer states": (ValueError, ""),
}
"""What is raised, if anything is, and what the error of a request says. None says anything if draft
tokens are wrong."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_pass_ends_its_own_requests(pair: Any, alone: list[Any], fault: str) -> None:
    """Pass 2 is of one request, and pass 10 of two."""
    (part, how), (error, message) = fault.split(), FAULTS[fault]
    least, most = (1, 1 if how == "row" else 2) if message else (0, 0)
    for call in (2, 10):
        with fail(pair, part, call=call, how=how, error=error) as fired:
            errors = decoded(pair, alone)
        assert fired and least <= len(errors) <= most
        for line in errors.values():
            assert message in line and "\n" not in line and "planted" not in line
    assert decoded(pair, alone) == {}


@pytest.mark.parametrize(
    ("part", "call", "how"), [("target", 13, "after"), ("proposer", 2, "before")]
)
def test_an_interrupt_is_raised_and_leaves_nothing_wrong(
    pair: Any, alone: list[Any], part: str, call: int, how: str
) -> None:
    with (
        fail(pair, part, call=call, how=how, error=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        decoded(pair, alone)
    assert decoded(pair, alone) == {}


@pytest.mark.parametrize("how", [how for how in HOWS if how != "row"])
@pytest.mark.parametrize("part", PARTS)
def test_a_single_completion_raises_what_failed_and_keeps_the_prefix_cache_right(
    pair: Any, alone: list[Any], part: str, how: str
) -> None:
    """The target's first pass is a prefill. Logits of a prefill are not used."""
    cache, request, expected = PromptCache(1 << 24), REQUESTS[2], alone[2]
    for call in (1, 2, 3):
        tokens: tuple[int, ...] = ()
        raises: Any = DecodingError if how in ("logits", "states") else RuntimeError
        healthy = how in ("logits", "states") and (
            part == "proposer" or (how, call) == ("logits", 1)
        )
        with fail(pair, part, call=call, how=how) as fired:
            run = stream_generate(pair, request.prompt, request.options, cache=cache)
            try:
                for step in run:
                    tokens += step.tokens
            except raises as problem:
                assert not healthy
                assert str(problem) == "planted" or DAMAGED in str(problem)
            else:
                assert healthy and run.result().text == expected.text
        assert fired and tokens == expected.tokens[: len(tokens)]
    for _ in range(2):
        run = stream_generate(pair, request.prompt, request.options, cache=cache)
        assert run.result().tokens == expected.tokens
    assert run.result().labels.cached_tokens > 0


class Fails(Proposer):
    """A proposer that drafts one token and fails in the n-th call of one of its methods."""

    def __init__(self, method: str, call: int) -> None:
        self.method, self.left = method, call

    def _called(self, method: str) -> None:
        self.left -= method == self.method
        if self.left == 0:
            raise ZeroDivisionError("planted")

    def begin(self, prompts: Any) -> None:
        self._called("begin")

    def ready(self, committed: Any, limit: int) -> bool:
        self._called("ready")
        return True

    def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
        self._called("propose")
        return Proposal.one_hot([[7]])

    def observe(self, tokens: Any, scores: Any) -> None:
        self._called("observe")


@pytest.mark.parametrize(
    ("method", "call"), [("begin", 1), ("propose", 1), ("propose", 3), ("observe", 2)]
)
def test_a_callers_own_proposer_may_raise(
    pair: Any, alone: list[Any], method: str, call: int
) -> None:
    request, tokens = REQUESTS[2], ()
    run = stream_generate(
        pair, request.prompt, replace(OPTIONS, proposer=None), proposer=Fails(method, call)
    )
    with pytest.raises(ZeroDivisionError, match="planted"):
        for step in run:
            tokens += step.tokens
    assert alone[2].tokens[: len(tokens)] == tokens
    assert generate(pair, request.prompt, request.options).tokens == alone[2].tokens


RULES: list[dict[str, Any]] = [
    {},
    *({"temperature": 0.7, "rule": rule} for rule in (None, "token", "block", "typical")),
    {"delta": 0.5},
]
ANSWERS = {"<bad>": "never written", "<good>": "one two three four five six seven eight"}


class Recites(Proposer):
    """A proposer of the tokens that follow in a text."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
        at = len(committed[0])
        return Proposal.one_hot([self.text[at : at + limit]])


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that continues <bad>, and also the end of a text, with a token after which all logits
    are NaN."""
    directory = tmp_path_factory.mktemp("poisoned")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    learned(directory, ANSWERS, template)
    [first, *_] = generate(load(directory), "<bad>", Options(max_tokens=1)).tokens
    poison(directory, first)
    return directory


@pytest.fixture(scope="module")
def damaged(poisoned: Path) -> Any:
    return load(poisoned)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("reason", "cue", "settings", "text"),
    [
        ("eos", "<good>", {}, ANSWERS["<good>"]),
        ("stop", "<bad>", {"stop": "neve"}, ""),
        ("length", "<bad>", {"max_tokens": 1}, "neve"),
    ],
)
def test_what_is_damaged_after_the_end_is_not_looked_at(
    damaged: Any, rule: dict[str, Any], reason: str, cue: str, settings: dict[str, Any], text: str
) -> None:
    """A draft goes on after the end, with tokens that the target would choose too."""
    prompt = damaged.tokenizer.encode(cue)
    good = generate(damaged, "<good>", Options(max_tokens=40)).tokens
    bad = generate(damaged, "<bad>", Options(max_tokens=1)).tokens
    drafted = [*prompt, *(good if cue == "<good>" else ()), *bad, *good]
    options = Options(num_draft=16, cost_cache=False, **{"max_tokens": 40, **rule, **settings})
    result = stream_generate(damaged, prompt, options, proposer=Recites(drafted)).result()
    assert (result.text, result.finish_reason) == (text, reason)
    assert result.stats.accepted == (0 if reason == "length" else len(result.tokens))
