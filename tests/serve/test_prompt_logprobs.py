"""Log-probabilities of prompts, `echo` with `logprobs`, as lm-evaluation-harness asks for them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from starlette.testclient import TestClient

from mlx_specdec.decoding import sequence
from mlx_specdec.engine import opening
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache_files import Store

from ..support.serving import COMPLETIONS, TEXT, client_of, ok, running, streamed

LONG = TEXT + "(path):\n    return [line for line in open(path)]\n"
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
"""The fields that lm-evaluation-harness sends, besides model, seed and prompt."""


def direct(pair: Pair, ids: Sequence[int]) -> mx.array:
    """The log-probabilities of all tokens after each token, by one pass over the prompt."""
    logits = pair.target.open(ids).advance(mx.array([list(ids)])).logits[0].astype(mx.float32)
    logits = logits[:, : pair.vocabulary]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def listed(client: TestClient, prompt: object, **more: Any) -> dict[str, Any]:
    [choice] = ok(client, COMPLETIONS, **{**BODY, "prompt": prompt, **more})["choices"]
    return choice["logprobs"]


@pytest.mark.parametrize("chunk", [3, 512])
def test_each_token_has_the_log_probability_of_a_direct_pass(
    client: TestClient, pair: Pair, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(opening, "SCORED", chunk * pair.vocabulary)
    monkeypatch.setattr(sequence, "SCORED_ROWS", 7)
    ids, rows = pair.tokenizer.encode(LONG), []
    scored = sequence.token_logprobs

    def watched(logits: mx.array, *rest: Any) -> Any:
        rows.append(logits.shape[0])
        return scored(logits, *rest)

    monkeypatch.setattr(sequence, "token_logprobs", watched)
    found = listed(client, LONG, logprobs=3)
    # No call sees more rows than its limit, and all calls together see each row once.
    assert max(rows) == min(chunk, 7) and sum(rows) == len(ids)
    expected = direct(pair, ids)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for at, token in enumerate(ids[1:]):
        assert found["token_logprobs"][at + 1] == pytest.approx(
            expected[at, token].item(), abs=1e-4
        )
        best = mx.sort(expected[at])[-3:].tolist()
        assert sorted(found["top_logprobs"][at + 1].values()) == pytest.approx(best, abs=1e-4)
    assert len(found["tokens"]) == len(ids) + 1 == len(found["token_logprobs"])


def test_offsets_point_into_the_echoed_text(client: TestClient, pair: Pair) -> None:
    for prompt in (LONG, "é — ü" + TEXT):
        for sent in (prompt, pair.tokenizer.encode(prompt)):
            body = {**BODY, "prompt": sent, "max_tokens": 0}
            [choice] = ok(client, COMPLETIONS, **body)["choices"]
            found = choice["logprobs"]
            assert choice["text"] == prompt
            ends = [*found["text_offset"][1:], len(prompt)]
            for token, begin, end in zip(found["tokens"], found["text_offset"], ends, strict=True):
                # Special tokens are not in the text.
                if not token.startswith(("bytes:", "<|")):
                    assert choice["text"][begin:end] == token


def test_a_prompt_is_scored_without_a_completion(client: TestClient, pair: Pair) -> None:
    ids = pair.tokenizer.encode(LONG)
    answer = ok(client, COMPLETIONS, **{**BODY, "prompt": ids, "max_tokens": 0})
    [choice] = answer["choices"]
    assert choice["text"] == LONG and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    longer = listed(client, ids)
    assert choice["logprobs"] == {name: values[:-1] for name, values in longer.items()}
    # A prompt of one token has nothing before it.
    [single] = ok(client, COMPLETIONS, **{**BODY, "prompt": ids[:1], "max_tokens": 0})["choices"]
    assert single["logprobs"]["token_logprobs"] == single["logprobs"]["top_logprobs"] == [None]


def test_scores_do_not_depend_on_drafts_or_on_other_requests(
    client: TestClient, pair: Pair
) -> None:
    ids = pair.tokenizer.encode(LONG)
    prompts = [ids[: 5 + 7 * at] for at in range(6)]
    alone = [listed(client, prompt, speculative=False, max_tokens=5) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: listed(client, prompt, max_tokens=5), prompts))
    assert together == alone
    choices = ok(client, COMPLETIONS, **{**BODY, "prompt": prompts, "max_tokens": 5})["choices"]
    assert [choice["logprobs"] for choice in choices] == alone


def test_a_stream_adds_up_to_the_answer(client: TestClient) -> None:
    body = {**BODY, "prompt": LONG, "max_tokens": 9, "logprobs": 2}
    complete = ok(client, COMPLETIONS, **body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in streamed(client, COMPLETIONS, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == complete["text"]
    lists = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    added = {name: [one for part in lists for one in part[name]] for name in complete["logprobs"]}
    assert added == complete["logprobs"] and chunks[0]["text"] == LONG


def test_a_cached_prompt_is_scored_again(llama: tuple[Path, Path]) -> None:
    with running(llama, store=Store(1 << 26)) as engine:
        client = client_of(engine)
        first = listed(client, LONG)
        ok(client, COMPLETIONS, prompt=LONG, max_tokens=2)
        answer = ok(client, COMPLETIONS, prompt=LONG, max_tokens=2)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert listed(client, LONG) == first


def test_an_encoder_gives_no_scores(t5: tuple[Path, Path]) -> None:
    with running(t5) as engine:
        answer = client_of(engine).post(COMPLETIONS, json={**BODY, "prompt": "Hello"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"


def test_a_suffix_has_no_scores(client: TestClient) -> None:
    answer = client.post(COMPLETIONS, json={**BODY, "prompt": "a", "suffix": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "echo"


def test_a_harness_finds_the_likeliest_continuation(client: TestClient, pair: Pair) -> None:
    """What lm-evaluation-harness computes from an answer: the sum of the continuation's
    log-probabilities, and whether each of its tokens is the likeliest one."""
    context = pair.tokenizer.encode(TEXT)
    answer = ok(client, COMPLETIONS, prompt=context, max_tokens=3, temperature=0, logprobs=0)
    likely = ok(client, "/tokenize", content=TEXT + answer["choices"][0]["text"])["tokens"]
    for ids in (likely, [*context, *likely[len(context) :][::-1], 7]):
        found, end = listed(client, ids), len(ids)
        logprobs = found["token_logprobs"][len(context) : -1]
        tops = found["top_logprobs"][len(context) : -1]
        expected = direct(pair, ids)
        places = range(len(context), end)
        total = sum(expected[at - 1, ids[at]].item() for at in places)
        assert sum(logprobs) == pytest.approx(total, abs=1e-3)
        greedy = all(mx.argmax(expected[at - 1]).item() == ids[at] for at in places)
        read = zip(logprobs, tops, strict=True)
        assert all(logprob == max(top.values()) for logprob, top in read) == greedy
