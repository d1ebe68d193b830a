"""How many tokens a pass of the target brings where a coding agent edits files turn by turn.

    python scripts/replay_edits.py [--files 6] [--prompts FILE.jsonl ...] [SOURCES ...]

The texts are the first lines of SOURCES (files of this package by default), each edited four times:
a name, a number, a line more, a line less. Each answer is the whole text with the edit, and greedy.
A small model cannot write it, so the target is the shipped one, which computes its passes in full,
and whose choice is then replaced by the token that is to come (a forced replay). Three kinds of
prompts: the whole conversation, the newest version alone, and the instruction alone, as after
a compaction. Texts without repetition: the second half of each source, written for the first time,
and what the model itself writes for --prompts (one JSON object with "prompt" a line).

With and without what was written before (history); the methods take turns text by text, in one
process. A line of JSON for each kind and method: tokens a pass, accepted share of drafts, seconds
of plain decoding over those of the method by wall and by CPU, in sum and at the worst text, and how
many texts differ from plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_specdec import Options, generate, load, with_history
from mlx_specdec import process as blas

blas.load()

import mlx.core as mx  # noqa: E402

from mlx_specdec.draft_length.saved import Memory  # noqa: E402
from mlx_specdec.engine.pair import Pair  # noqa: E402
from mlx_specdec.interfaces import Context, Model, Scores  # noqa: E402
from mlx_specdec.interfaces.results import Cached  # noqa: E402

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "mlx_specdec").glob("*/[b-s]*.py"))
WEIGHTS = ROOT / "weights"
LINES, EDITS, WARM_UP = 24, 4, 2
WORDS = ["first", "later", "cached", "sorted", "inner", "whole", "other", "given"]
SURE = 1e4
"""What is added to the logit of the token that is to come."""
METHODS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"regular": True}, False),
    "lookup": ({"proposer": "ngram"}, False),
    "lookup + history": ({"proposer": "ngram"}, True),
    "draft": ({"proposer": "draft"}, False),
    "auto": ({}, False),
    "auto + history": ({}, True),
}
"""Options, and whether lookup searches what was written before."""


class ForcedModel:
    """A model that computes in full and chooses the tokens of a text. text: all committed tokens,
    prompt included, or None for its own choice."""

    batches = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self.text: list[int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open(self, prompt: Sequence[int], cached: Cached | None = None) -> Context:
        context = self._model.open(prompt, cached)
        return context if self.text is None else ForcedContext(context, self.text)  # type: ignore[return-value]


class ForcedContext:
    """A context whose logits prefer what follows in the text at each place."""

    def __init__(self, context: Context, text: Sequence[int]) -> None:
        self._context = context
        self._following = mx.array([*text[1:], *[0] * 64], mx.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        [begin] = self._context.lengths
        scores = self._context.advance(tokens, proposed, taps)
        rows = scores.logits.shape[1]
        end = begin + tokens.shape[1]
        chosen = self._following[end - rows : end, None] == mx.arange(scores.logits.shape[-1])
        return replace(scores, logits=scores.logits + SURE * chosen[None])


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer; None where the model writes its own."""

    prompt: str
    answer: str | None


def edited(text: str, dice: random.Random) -> tuple[str, str]:
    """Return a text with one edit, and what a user would say to get it."""
    lines = text.splitlines(keepends=True)
    names = sorted({each for each in re.findall(r"\b[a-z_]{4,}\b", text) if text.count(each) > 2})
    numbers = re.findall(r"\b\d+\b", text)
    kind = dice.choice(["name", "number", "more", "less"])
    if kind == "name" and names:
        old = dice.choice(names)
        new = f"{dice.choice(WORDS)}_{old}"
        return re.sub(rf"\b{old}\b", new, text), f"Rename {old} to {new}."
    if kind == "number" and numbers:
        old, new = dice.choice(numbers), str(dice.randrange(1000))
        return re.sub(rf"\b{old}\b", new, text, count=1), f"Take {new} in place of {old}."
    at = dice.randrange(1, len(lines))
    indent = re.match(r" *", lines[at])
    assert indent is not None
    if kind == "less":
        return "".join([*lines[:at], *lines[at + 1 :]]), f"Remove line {at}."
    said = " ".join(dice.choice(WORDS) for _ in range(5))
    return (
        "".join([*lines[:at], f"{indent[0]}# {said.capitalize()}.\n", *lines[at:]]),
        f"Say at line {at} that it is {said}.",
    )


def conversations(sources: Sequence[Path], count: int) -> dict[str, list[list[Turn]]]:
    """Return the turns of each kind, a list for each source."""
    dice = random.Random(1)
    made: dict[str, list[list[Turn]]] = {
        name: [] for name in ("conversation", "file shown", "file not shown", "new text")
    }
    for source in sources:
        lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
        if len(lines) < 3 * LINES or len(made["new text"]) == count:
            continue
        text = "".join(lines[LINES : 2 * LINES])
        head = f"# {source.name}\n"
        said = head + text
        turns: dict[str, list[Turn]] = {name: [] for name in made}
        for _ in range(EDITS):
            new, wish = edited(text, dice)
            said += f"# {wish}\n"
            turns["conversation"].append(Turn(said, new))
            turns["file shown"].append(Turn(f"{head}{text}# {wish}\n", new))
            turns["file not shown"].append(Turn(f"{head}# {wish}\n", new))
            said, text = said + new, new
        rest = "".join(lines[2 * LINES : 3 * LINES])
        turns["new text"] = [Turn("".join(lines[:LINES]), rest)]
        for name, its in turns.items():
            made[name].append(its)
    return made


@dataclass
class Sums:
    """Figures of one method over the texts of a kind."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    differing: int = 0

    def add(self, stats: Any, tokens: int, same: bool) -> None:
        self.tokens += tokens
        self.rounds += stats.rounds
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.differing += not same


def methods_of(pair: Pair) -> Iterator[tuple[str, Pair, Options]]:
    """Yield the methods, each with a pair that has learned nothing and read nothing."""
    for name, (settings, history) in METHODS.items():
        own = replace(pair, learned=Memory(), trials=type(pair.trials)(pair.trials.default_factory))
        options = Options(chat_template=False, cost_cache=False, **settings)
        yield name, with_history(own) if history else own, options


def replay(
    pair: Pair, target: ForcedModel, kind: str, turns: Sequence[Turn], most: int
) -> Iterator[dict[str, Any]]:
    """Write the answers by all methods in turns, and yield a report for each method."""
    encode = pair.tokenizer.encode
    methods = list(methods_of(pair))
    sums = {name: Sums() for name, _, _ in methods}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sums}
    for number, turn in enumerate(turns):
        prompt = list(encode(turn.prompt))
        answer = None if turn.answer is None else list(encode(turn.prompt + turn.answer))
        if answer is not None and answer[: len(prompt)] != prompt:
            prompt = answer[: next(n for n in range(len(prompt)) if answer[n] != prompt[n])]
        count = most if answer is None else len(answer) - len(prompt)
        if len(prompt) + count > (target.max_length or sys.maxsize):
            continue
        target.text = answer
        plain: tuple[int, ...] = ()
        taken = {}
        for name, own, options in methods[:1] + random.Random(number).sample(
            methods[1:], len(methods) - 1
        ):
            begun = time.process_time()
            result = generate(own, prompt, replace(options, max_tokens=count))
            # The prompt is the same work for all: the CPU's part of it goes by the wall's.
            seconds = result.stats.seconds
            share = seconds.decoding / (seconds.decoding + seconds.prompt)
            taken[name] = seconds.decoding, share * (time.process_time() - begun)
            plain = plain or result.tokens
            if number >= WARM_UP:
                sums[name].add(result.stats, len(result.tokens), result.tokens == plain)
        if number >= WARM_UP:
            for name, each in taken.items():
                times[name].append(each)
    for name, its in sums.items():
        report = {"kind": kind, "method": name, "texts": len(times[name]), "tokens": its.tokens}
        report["tokens_a_pass"] = round(its.tokens / its.rounds, 2)
        report["accepted"] = round(its.accepted / its.drafted, 2) if its.drafted else None
        for at, clock in enumerate(("wall", "cpu")):
            pairs = [(a[at], b[at]) for a, b in zip(times["plain"], times[name], strict=True)]
            before, after = map(sum, zip(*pairs, strict=True))
            report[clock] = round(before / after, 2)
            report[f"worst_{clock}"] = round(min(a / b for a, b in pairs), 2)
        yield {**report, "differing": its.differing}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sources", nargs="*", type=Path, default=SOURCES)
    parser.add_argument("--files", type=int, default=6)
    parser.add_argument("--kinds", default="", help="only kinds whose name begins so")
    parser.add_argument("--prompts", nargs="*", type=Path, default=[ROOT / "prompts/python.jsonl"])
    parser.add_argument("--limit", type=int, default=12, help="of prompts in a file")
    parser.add_argument("--max-tokens", type=int, default=100, help="for each of --prompts")
    args = parser.parse_args()
    pair = load(WEIGHTS / "py-llama", WEIGHTS / "py-llama-draft")
    target = ForcedModel(pair.target)
    pair = replace(pair, target=target)  # type: ignore[arg-type]
    kinds = {
        name: [turn for turns in its for turn in turns]
        for name, its in conversations(args.sources, args.files).items()
    }
    for file in args.prompts:
        lines = file.read_text(encoding="utf-8").splitlines()[: args.limit]
        kinds[file.stem] = [Turn(json.loads(line)["prompt"], None) for line in lines]
    for kind, turns in kinds.items():
        if kind.startswith(args.kinds):
            for report in replay(pair, target, kind, turns, args.max_tokens):
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
