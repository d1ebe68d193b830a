"""Published models have the token ids and chat prompts of llama.cpp, and the log-probabilities and
greedy outputs of transformers."""

from typing import Any

import mlx.core as mx

from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.options import Options

References = dict[str, Any]
CLOSE = {"smollm2": 2e-3, "gemma3": 0.2, "qwen-coder": 2e-3}
"""Largest accepted difference of log-probabilities in nats. Measured on x86 with MKL: 2.5e-4, 0.1
and 5.3e-4. mlx-lm rounds Gemma's embedding scale to bfloat16, 25.25 instead of 25.298."""


def test_texts_have_llama_cpps_tokens(pair: Pair, references: References):
    texts = references["texts"]
    assert {t: pair.tokenizer.encode(t) for t, _ in texts} == dict(texts)


def test_chats_have_llama_cpps_prompts(pair: Pair, references: References):
    assert pair.tokenizer.has_chat_template == bool(references["chats"])
    for messages, ids in references["chats"]:
        assert pair.tokenizer.apply_chat(messages) == ids, messages


def test_log_probabilities_are_those_of_transformers(name: str, pair: Pair, references: References):
    for completion in references["completions"]:
        prompt, tokens = completion["prompt"], completion["tokens"]
        read = [*prompt, *tokens[:-1]]
        scores = pair.target.open(read).advance(mx.array([read], dtype=mx.int32))
        rows = scores.logits[0, -len(tokens) :].astype(mx.float32)
        rows -= mx.logsumexp(rows, axis=-1, keepdims=True)
        assert mx.argmax(rows, axis=-1).tolist() == tokens
        likeliest = mx.array(completion["likeliest"])  # (tokens, 5, 2): pairs of id and value
        ids, expected = likeliest[..., 0].astype(mx.int32), likeliest[..., 1]
        found = mx.take_along_axis(rows, ids, axis=-1)
        assert mx.max(mx.abs(found - expected)).item() < CLOSE[name]


def test_greedy_outputs_are_those_of_transformers(pair: Pair, references: References):
    for completion in references["completions"]:
        options = Options(max_tokens=len(completion["tokens"]), regular=True)
        result = generate(pair, completion["prompt"], options)
        assert list(result.tokens) == completion["tokens"]
