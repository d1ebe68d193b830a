"""A prefix cache saves prefill and changes no output, in memory and in a directory."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, PromptCache, Request, generate, stream_generate

from .outcomes import alone
from .pairs import T5, Pairs, hidden_states, model
from .support import command, moved

OPTIONS = Options(max_tokens=8, num_draft=3, temperature=0.7, seed=5, cost_cache=False)


def cached_tokens(pair: Any, prompt: Any, cache: PromptCache) -> int:
    """Complete a prompt as plain decoding does, and return the tokens that needed no prefill."""
    result = stream_generate(pair, prompt, OPTIONS, cache=cache).result()
    assert result.tokens == generate(pair, prompt, OPTIONS).tokens
    return result.labels.cached_tokens


CUT, AS_A_WHOLE, SOURCE = "any beginning", "a whole prompt", "the same source"
HITS = {
    **dict.fromkeys(("llama", "llama, eagle3", "llama, own heads"), CUT),
    **dict.fromkeys(
        ("gemma3_wrapped", "mamba2", "qwen3, newest 9", "qwen3_next, dspark"), AS_A_WHOLE
    ),
    T5: SOURCE,
}
"""What of earlier prompts a pair can use."""
BEGIN, PROMPT = [11, 40, 23, 5, 9, 31, 7, 8, 50, 26, 19, 33], [5, 9, 12, 7, 33, 21, 8]


@pytest.mark.parametrize("name", HITS)
def test_prompts_that_begin_alike_are_prefilled_once(name: str, pairs: Pairs) -> None:
    """The second prompt is the next turn of a chat, and the third one branches off."""
    pair, cache = pairs(name), PromptCache(1 << 24)
    options = replace(OPTIONS, logit_bias=dict.fromkeys(pair.eos_token_ids, -math.inf))
    first = generate(pair, BEGIN + PROMPT, replace(options, regular=True)).tokens
    turn, branch, found = [*BEGIN, *PROMPT, *first, 17, 44], [*BEGIN, 4, 5, 3], []
    for prompt in (BEGIN + PROMPT, turn, branch, turn):
        result = stream_generate(pair, prompt, options, cache=cache).result()
        assert result.tokens == generate(pair, prompt, replace(options, regular=True)).tokens
        found.append(result.labels.cached_tokens)
    least = {
        CUT: [0, len(turn) - 8, len(BEGIN) - 1, len(turn) - 2],
        AS_A_WHOLE: [0, len(BEGIN + PROMPT) - 1, 0, len(BEGIN + PROMPT) - 1],
        SOURCE: [0, 0, 0, len(turn)],
    }[HITS[name]]
    assert all(map(int.__ge__, found, least)), (found, least)
    assert HITS[name] == CUT or found[2] == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_an_interrupted_completion_has_prefilled_is_kept(steps: int, pairs: Pairs) -> None:
    pair, cache = pairs("llama, eagle3"), PromptCache(1 << 24)
    options = replace(OPTIONS, prefill_step_size=8)
    run = stream_generate(pair, BEGIN + PROMPT, options, cache=cache)
    for _ in itertools.islice(run, steps):
        pass
    run.interrupt()
    assert run.result().finish_reason == "interrupted"
    assert cached_tokens(pair, BEGIN + PROMPT, cache) == (0, 7, 17)[min(steps, 2)]


def test_a_turn_may_differ_from_the_end_of_the_last_prompt(pairs: Pairs) -> None:
    """As if a template drops thoughts. A recurrent state is kept some tokens before the end."""
    pair, cache = pairs("mamba2"), PromptCache(1 << 24)
    begin = [(7 * place) % 50 + 3 for place in range(100)]
    cached_tokens(pair, [*begin, 5, 6, 7], cache)
    assert cached_tokens(pair, [*begin, 5, 9, 11, 12], cache) == 103 - 16


def test_a_cache_stays_within_its_bytes_and_forgets_what_was_used_longest_ago(pairs: Pairs) -> None:
    pair = pairs("llama")
    prompts = [[token] * 40 for token in (3, 4, 5)]
    whole = PromptCache(1 << 24)
    for prompt in prompts:
        cached_tokens(pair, prompt, whole)
    small = PromptCache(whole.nbytes * 5 // 6)
    for prompt in (*prompts[:2], prompts[0], prompts[2]):
        cached_tokens(pair, prompt, small)
        assert 0 < small.nbytes <= small.max_bytes
    # A lookup keeps what it has found, so the prompt that must be gone comes last.
    assert [cached_tokens(pair, prompts[at], small) for at in (0, 2, 1)] == [39, 39, 0]
    tiny = PromptCache(1)
    assert [cached_tokens(pair, prompts[0], tiny) for _ in range(2)] == [0, 0]


def test_a_completion_is_cached_for_the_next_turn(pairs: Pairs) -> None:
    pair, cache = pairs("llama"), PromptCache(1 << 24)
    first = alone(pair, Request([5, 9, 12, 7], OPTIONS), cache=cache)
    assert cached_tokens(pair, [5, 9, 12, 7, *first.tokens, 8], cache) >= 4 + len(first.tokens) - 1


def test_parts_of_two_prompts_are_not_joined(pairs: Pairs) -> None:
    """The third prompt begins as the second one and ends as the first one."""
    pair, cache = pairs("llama"), PromptCache(1 << 26)
    one, other, end = ([step * place % 47 + 3 for place in range(1, 257)] for step in (7, 11, 5))
    prompts = [*one, *end, 5], [*other, 9], [*other, *end, 5]
    assert [cached_tokens(pair, prompt, cache) for prompt in prompts] == [0, 0, 256]


KINDS = ("llama, 8 bits", "eagle3", "qwen3_next", "t5")


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_keeps_prefixes_between_commands(kind: str, tmp_path: Path) -> None:
    """A command that runs later prefills nothing again."""
    name = {"gemma3": "gemma3_wrapped", "t5": T5}.get(kind, kind)
    flags: list[Any] = ["--num-draft", 2, "--json", "-m", 8, "--temp", 0.7]
    if kind == "eagle3":
        hidden_states("eagle3")(tmp_path)
        flags += ["--model", tmp_path / "target", "--draft-model", tmp_path / "drafter"]
    else:
        changes = {"head_dim": 32} if kind == "llama, 8 bits" else {}
        target = model(tmp_path / "target", name.split(",")[0], **changes)
        flags += ["--model", target, "--draft-model", moved(target, tmp_path / "draft")]
    if kind == "llama, 8 bits":
        flags += ["--kv-bits", 8, "--kv-group-size", 32]
    prompt = "abcdefgh0123 {[]}: " * 4

    def run(*more: Any) -> tuple[str, int]:
        done = command("generate", *flags, *more, prompt)
        assert done.code == 0, done.err
        answer = json.loads(done.out)
        return answer["text"], answer["cached_tokens"]

    plain, cache = run(), ("--prompt-cache-dir", tmp_path / "cache")
    assert [run(*cache)[0], plain[1]] == [plain[0], 0]
    text, cached = run(*cache)
    assert text == plain[0] and cached > 8
