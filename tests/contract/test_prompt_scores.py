"""Log-probabilities of prompts, `echo` with `logprobs`, as lm-evaluation-harness asks for them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from .zoo import COMPLETIONS, TEXT, Model

Models = Callable[[str], Model]
LONG = TEXT + "(path):\n    return [line for line in open(path)]\n"
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
"""The fields that lm-evaluation-harness sends, besides model, seed and prompt."""


@pytest.fixture(scope="module")
def tiny(models: Models) -> Model:
    return models("tiny")


@pytest.fixture(scope="module")
def direct(tiny: Model) -> Callable[[Sequence[int]], mx.array]:
    """Return the log-probabilities of all tokens after each token, by mlx-lm in one pass."""
    model = mlx_lm.load(str(tiny.path))[0]

    def scored(ids: Sequence[int]) -> mx.array:
        logits = model(mx.array([list(ids)]))[0]
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    return scored


def listed(model: Model, prompt: object, **more: Any) -> Any:
    return model.choice(COMPLETIONS, **{**BODY, "prompt": prompt, **more})["logprobs"]


@pytest.mark.parametrize("repeats", [1, 20])
def test_each_token_has_the_log_probability_of_a_direct_pass(
    tiny: Model, direct: Callable[[Sequence[int]], mx.array], repeats: int
) -> None:
    """The longer prompt takes several passes."""
    ids = tiny.ids(LONG * repeats)
    assert repeats == 1 or len(ids) > 600
    found, expected = listed(tiny, ids, logprobs=3), direct(ids)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    own = mx.take_along_axis(expected[:-1], mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    assert found["token_logprobs"][1:-1] == pytest.approx(own.tolist(), abs=1e-4)
    best: Any = mx.sort(expected[:-1], axis=-1)[:, -3:].tolist()
    for tops, values in zip(found["top_logprobs"][1:-1], best, strict=True):
        assert sorted(tops.values()) == pytest.approx(values, abs=1e-4)
    assert len(found["tokens"]) == len(ids) + 1 == len(found["token_logprobs"])


def test_offsets_point_into_the_echoed_text(tiny: Model) -> None:
    for prompt in (LONG, "é — ü" + TEXT):
        for sent in (prompt, tiny.ids(prompt)):
            choice = tiny.choice(COMPLETIONS, **{**BODY, "prompt": sent, "max_tokens": 0})
            found = choice["logprobs"]
            assert choice["text"] == prompt
            ends = [*found["text_offset"][1:], len(prompt)]
            for token, begin, end in zip(found["tokens"], found["text_offset"], ends, strict=True):
                # Special tokens are not in the text.
                if not token.startswith(("bytes:", "<|")):
                    assert choice["text"][begin:end] == token


def test_a_prompt_is_scored_without_a_completion(tiny: Model) -> None:
    ids = tiny.ids(LONG)
    answer = tiny.ok(COMPLETIONS, **{**BODY, "prompt": ids, "max_tokens": 0})
    [choice] = answer["choices"]
    assert choice["text"] == LONG and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    longer = listed(tiny, ids)
    assert choice["logprobs"] == {name: values[:-1] for name, values in longer.items()}
    # A prompt of one token has nothing before it.
    single = listed(tiny, ids[:1], max_tokens=0)
    assert single["token_logprobs"] == single["top_logprobs"] == [None]


def test_scores_do_not_depend_on_drafts_or_on_other_requests(tiny: Model) -> None:
    ids = tiny.ids(LONG)
    prompts = [ids[: 5 + 7 * at] for at in range(6)]
    alone = [listed(tiny, prompt, speculative=False, max_tokens=3) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: listed(tiny, prompt, max_tokens=3), prompts))
    choices = tiny.ok(COMPLETIONS, **{**BODY, "prompt": prompts, "max_tokens": 3})["choices"]
    for found in (together, [choice["logprobs"] for choice in choices]):
        for one, other in zip(found, alone, strict=True):
            assert one["tokens"] == other["tokens"]
            assert one["text_offset"] == other["text_offset"]
            # Batches of different sizes are rounded differently.
            numbers, expected = one["token_logprobs"][1:], other["token_logprobs"][1:]
            assert numbers == pytest.approx(expected, abs=1e-4)
            assert [*map(list, one["top_logprobs"][1:])] == [*map(list, other["top_logprobs"][1:])]


def test_a_stream_adds_up_to_the_answer(tiny: Model) -> None:
    body = {**BODY, "prompt": LONG, "max_tokens": 6, "logprobs": 2}
    whole = tiny.choice(COMPLETIONS, **body)
    chunks = [chunk["choices"][0] for chunk in tiny.streamed(COMPLETIONS, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    lists = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    added = {name: [one for part in lists for one in part[name]] for name in whole["logprobs"]}
    assert added == whole["logprobs"] and chunks[0]["text"] == LONG


def test_a_cached_prompt_is_scored_again(models: Models) -> None:
    model = models("templated")
    first = listed(model, LONG)
    for _ in range(2):
        answer = model.ok(COMPLETIONS, prompt=LONG, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
    assert listed(model, LONG) == first
