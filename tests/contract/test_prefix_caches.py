"""A prefix cache saves prefill and changes no output, in memory and in a directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, PromptCache, Request, generate, stream_generate

from .outcomes import alone
from .pairs import PAIRS, T5, hidden_states, model
from .support import command, moved

SYSTEM = "abcdefgh0123 {[]}: "
PROMPTS = [SYSTEM + "ab12", SYSTEM + "hgfe", SYSTEM + "ab12cd34", "dd", SYSTEM]
OPTIONS = Options(max_tokens=8, num_draft=3, temperature=0.7, seed=5, cost_cache=False)


def cached_tokens(pair: Any, prompt: Any, cache: PromptCache) -> int:
    """Complete a prompt as plain decoding does, and return the tokens that needed no prefill."""
    result = stream_generate(pair, prompt, OPTIONS, cache=cache).result()
    assert result.tokens == generate(pair, prompt, OPTIONS).tokens
    return result.labels.cached_tokens


@pytest.mark.parametrize("name", ["llama", "llama, eagle3", "gemma3_wrapped", "mamba2", T5])
def test_prompts_that_begin_alike_are_prefilled_once(name: str, tmp_path: Path) -> None:
    pair, cache = PAIRS[name](tmp_path), PromptCache(1 << 24)
    lengths = [len(pair.tokenizer.encode(prompt)) for prompt in PROMPTS]
    plain, found = [generate(pair, prompt, OPTIONS).tokens for prompt in PROMPTS], []
    for prompt, tokens in zip(PROMPTS * 2, plain * 2, strict=True):
        result = stream_generate(pair, prompt, OPTIONS, cache=cache).result()
        assert result.tokens == tokens
        found.append(result.labels.cached_tokens)
    if name == "llama":
        system = lengths[-1]
        assert found[:5] == [0, system, lengths[0], 0, system - 1]
        assert found[5:] == [length - 1 for length in lengths]
    assert max(found[5:]) > 8
    assert all(n <= length for n, length in zip(found[5:], lengths, strict=True))


def test_a_cache_stays_within_its_bytes_and_forgets_what_was_used_longest_ago(
    tmp_path: Path,
) -> None:
    pair = PAIRS["llama"](tmp_path)
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


def test_a_completion_is_cached_for_the_next_turn(tmp_path: Path) -> None:
    pair, cache = PAIRS["llama"](tmp_path), PromptCache(1 << 24)
    first = alone(pair, Request([5, 9, 12, 7], OPTIONS), cache=cache)
    assert cached_tokens(pair, [5, 9, 12, 7, *first.tokens, 8], cache) >= 4 + len(first.tokens) - 1


KINDS = ("llama, 8 bits", "eagle3", "qwen3_next", "gemma3", "t5")


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
    prompt = SYSTEM * 4 + "ab"

    def run(*more: Any) -> tuple[str, int]:
        done = command("generate", *flags, *more, prompt)
        assert done.code == 0, done.err
        answer = json.loads(done.out)
        return answer["text"], answer["cached_tokens"]

    plain, cache = run(), ("--prompt-cache-dir", tmp_path / "cache")
    assert [run(*cache)[0], plain[1]] == [plain[0], 0]
    text, cached = run(*cache)
    assert text == plain[0] and cached > 8
