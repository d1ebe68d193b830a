"""Published models have the token ids and chat prompts of llama.cpp, and the log-probabilities and
greedy outputs of transformers."""

from typing import Any

from mlx_specdec import Options, Request, generate, stream_many

References = dict[str, Any]
CLOSE = {"smollm2": 2e-3, "gemma3": 0.2, "qwen-coder": 2e-3}
"""Largest accepted difference of log-probabilities in nats. Measured on x86 with MKL: 2.5e-4, 0.1
and 5.3e-4. mlx-lm rounds Gemma's embedding scale to bfloat16, 25.25 instead of 25.298."""


def test_texts_have_llama_cpps_tokens(pair: Any, references: References):
    texts = references["texts"]
    assert {t: pair.tokenizer.encode(t) for t, _ in texts} == dict(texts)


def test_chats_have_llama_cpps_prompts(pair: Any, references: References):
    assert pair.tokenizer.has_chat_template == bool(references["chats"])
    for messages, ids in references["chats"]:
        assert pair.tokenizer.apply_chat(messages) == ids, messages


def test_log_probabilities_are_those_of_transformers(name: str, pair: Any, references: References):
    for completion in references["completions"]:
        prompt, tokens = completion["prompt"], completion["tokens"]
        request = Request([*prompt, *tokens], Options(max_tokens=0), (), 20, scores_prompt=True)
        [scored] = [
            step.prompt_logprobs for step in stream_many(pair, [request]) if step.prompt_logprobs
        ]
        found = scored[-len(tokens) :]
        assert [entry.top[0][0] for entry in found] == tokens
        for entry, likeliest in zip(found, completion["likeliest"], strict=True):
            values = dict(entry.top)
            assert all(abs(values[id] - value) < CLOSE[name] for id, value in likeliest)


def test_greedy_outputs_are_those_of_transformers(pair: Any, references: References):
    for completion in references["completions"]:
        options = Options(max_tokens=len(completion["tokens"]), regular=True)
        result = generate(pair, completion["prompt"], options)
        assert list(result.tokens) == completion["tokens"]
