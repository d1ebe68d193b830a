"""Sends a server the turns of coding agents, and reports what of each prompt was read again.

    python scripts/replay_agents.py [--model DIR] [-- FLAGS OF serve]

The turns have the shapes of what Codex (12 turns over /v1/responses), Claude Code (12 turns over
/v1/messages, with two subagents, a line of billing, countdowns and marks for the cache) and Cline
(8 turns over /v1/chat/completions) send; their texts are made here. Each answer is one token: what
the assistant said before is part of the turns. A line for each request: tokens of the prompt, the
share that the prompt cache had, the share that the longest earlier prompt would allow, and seconds.
Without --model it is a tiny random model with tools, so that seconds say little.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from served import Served, serving

PORT = 8096
CONTEXT = 131_072
Turn = tuple[str, str, dict[str, Any]]
"""Who sends it, the path, and the body."""
DICE = random.Random(1)
NAMES = ("read", "write", "list_files", "search", "run", "plan")
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path"],
}
TEXT = "the file reads a line of text and writes it to another place where tests look"
WORDS = TEXT.split()


def prose(words: int) -> str:
    """Return a text that no other one repeats."""
    return " ".join(DICE.choice(WORDS) for _ in range(words))


def shuffled(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with its keys in another order."""
    return {name: value[name] for name in DICE.sample(list(value), len(value))}


def codex(turns: int = 12) -> Iterator[Turn]:
    """Responses without a state: the whole history comes every time."""
    tools: list[Any] = [
        {"type": "function", "name": name, "description": prose(20), "parameters": PARAMETERS}
        for name in NAMES
    ]
    tools += [{"type": "custom", "name": "apply_patch", "description": prose(20)}]
    tools += [{"type": "web_search"}]
    body = {"instructions": prose(400), "tools": tools, "store": False, "stream": False}
    body |= {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "thread"}
    items: list[Any] = [
        _message("developer", prose(60)),
        _message("user", f"<environment_context>{prose(30)}</environment_context>"),
    ]
    for turn in range(turns):
        if turn % 4 == 0:
            items.append(_message("user", prose(40)))
        yield "codex", "/v1/responses", {**body, "input": list(items), "max_output_tokens": 1}
        thought = {"type": "reasoning", "summary": [], "content": None}
        items.append({**thought, "encrypted_content": f"mlx-specdec reasoning: {prose(30)}"})
        called = {"call_id": f"call_{turn}", "name": DICE.choice(NAMES)}
        arguments = json.dumps({"path": prose(1), "text": prose(10)})
        items.append({"type": "function_call", **called, "arguments": arguments})
        output = {"call_id": f"call_{turn}", "output": prose(120)}
        items.append({"type": "function_call_output", **output})


def _message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def claude_code(turns: int = 12, *, name: str = "claude", subagents: bool = True) -> Iterator[Turn]:
    """Messages with all that changes from one request to the next."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": text} for text in ("You are Claude Code.", prose(400))]
    tools = [{"name": each, "description": prose(20), "input_schema": PARAMETERS} for each in NAMES]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": prose(40)}]}]
    for turn in range(turns):
        billing = f"x-anthropic-billing-header: cc_version=2.1.181; cch={DICE.getrandbits(20):05x};"
        left = f"<total_tokens>{200_000 - 900 * turn} tokens left</total_tokens>"
        countdown = {"role": "system", "content": left}
        *before, last = messages
        *blocks, block = last["content"]
        marked = {**last, "content": [*blocks, {**block, **mark}]}
        yield (
            name,
            "/v1/messages",
            {
                "system": [{"type": "text", "text": billing}, *system[:1], {**system[1], **mark}],
                "tools": [shuffled(each) for each in tools],
                "messages": [*before, marked, countdown],
                "thinking": {"type": "adaptive"},
                "max_tokens": 1,
            },
        )
        if subagents and turn in (4, 8):
            yield from claude_code(3, name=f"subagent {turn}", subagents=False)
        thinking = {"type": "thinking", "thinking": prose(30), "signature": "x"}
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": DICE.choice(NAMES)}
        content = [thinking, {**call, "input": {"path": prose(1)}}]
        messages += [countdown, {"role": "assistant", "content": content}]
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": prose(120)}
        messages.append({"role": "user", "content": [result]})


def cline(turns: int = 8) -> Iterator[Turn]:
    """Chats whose tools are in the text, and whose messages end with the state of the editor."""
    messages = [{"role": "system", "content": prose(500)}]
    for _ in range(turns):
        state = f"<environment_details>{prose(20)}</environment_details>"
        parts = [{"type": "text", "text": text} for text in (prose(100), state)]
        messages.append({"role": "user", "content": parts})
        yield "cline", "/v1/chat/completions", {"messages": list(messages), "max_tokens": 1}
        messages.append({"role": "assistant", "content": f"<read_file>{prose(5)}</read_file>"})


def tokens_of(answer: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of a prompt and how many of them were cached, in any format's usage."""
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    name = "input_tokens" if "input_tokens" in usage else "prompt_tokens"
    return usage[name], usage[f"{name}_details"]["cached_tokens"]


def replay(served: Served, turns: Iterator[Turn]) -> dict[str, float]:
    """Send turns and print a line for each. Returns their sums."""
    lengths: dict[str, int] = {}
    reused = read = possible = 0
    seconds = 0.0
    for who, path, body in turns:
        begun = time.perf_counter()
        status, content = served.ask("POST", path, json.dumps(body).encode())
        took = time.perf_counter() - begun
        if status != 200:
            sys.exit(f"{status}: {content.decode('utf-8', 'replace')[:300]}")
        total, cached = tokens_of(json.loads(content))
        before = lengths.get(who)
        lengths[who] = total
        shares = f"{cached / total:6.3f} {'' if before is None else f'{before / total:6.3f}':>8}"
        print(f"{who:12} {total:7} {shares} {took:8.2f}", flush=True)
        if before is not None:
            reused, read, possible = reused + cached, read + total, possible + before
            seconds += took
    return {
        "reused": round(reused / read, 4),
        "possible": round(possible / read, 4),
        "seconds": round(seconds, 2),
    }


def tiny_model(directory: Path) -> Path:
    """Write a random model that knows tools and reads long prompts."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.tooled import make_tooled

    make_tooled(directory)
    file = directory / "config.json"
    settings = {**json.loads(file.read_text()), "max_position_embeddings": CONTEXT}
    file.write_text(json.dumps(settings))
    return directory


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or tiny_model(Path(directory))
        command = [sys.executable, "-m", "mlx_specdec", "serve", "--port", str(PORT)]
        command += ["--model", str(model), *(each for each in flags if each != "--")]
        print(f"{'who':12} {'prompt':>7} {'reused':>6} {'possible':>8} {'seconds':>8}")
        with serving(command, PORT) as served:
            report = {
                turns.__name__: replay(served, turns()) for turns in (codex, claude_code, cline)
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
