"""Compare the decoding loop with a bare loop that runs the same passes of the same models:

    python benchmarks/bare_loop.py [--turns 5] [--prompts 6] [--max-tokens 64] [--real-model FILE]

The bare loop knows nothing of stops, texts, constraints, noise or several requests: it calls the
models' contexts, takes the argmax and reads it. It repeats the passes of our run, so that lookups
cost it nothing. Both run in turns in one process. Prints one JSON object: our seconds over the bare
loop's, per model and proposer, and for decoder-only models the CPU seconds of the Python thread in
plain decoding over those of mlx-lm, as medians over the prompts."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_specdec import Options, load, stream_generate, system

if __name__ == "__main__":
    system.load_blas()

import mlx.core as mx

from mlx_specdec.core.loop import PREFILL_CHUNK
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import encode
from mlx_specdec.text.prompts import read_prompts
from mlx_specdec.types import Context, feed

ROOT = Path(__file__).resolve().parents[1]
PAIRS = (
    ("translation", "weights/t5-enfr", "weights/t5-enfr-draft", "prompts/translation.jsonl"),
    ("python", "weights/py-llama", "weights/py-llama-draft", "prompts/python.jsonl"),
)
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"regular": True},
    "draft 2": {"num_draft": 2, "proposer": "draft"},
    "lookup": {"num_draft": 4, "proposer": "ngram"},
}


@dataclass(frozen=True)
class Run:
    """One completion, timed from the end of its first round to the end of its last round but one,
    since an EOS token may cut the last round."""

    seconds: float
    thread: float
    tokens: list[int]
    rounds: list[tuple[int, int]]
    """Per round, how many tokens were drafted and accepted. The last round is not timed."""


def ours(pair: Pair, prompt: Sequence[int], options: Options) -> Run:
    tokens: list[int] = []
    rounds: list[tuple[int, int]] = []
    began = ended = (0.0, 0.0)
    for step in stream_generate(pair, list(prompt), options):
        if not step.tokens:
            continue
        if step.finish_reason is not None:
            rounds.append((step.drafted, step.accepted))
            break
        ended = perf_counter(), thread_time()
        if not tokens:
            began = ended
        rounds.append((step.drafted, step.accepted))
        tokens += step.tokens
    return Run(ended[0] - began[0], ended[1] - began[1], tokens, rounds)


def opened(model: Any, prompt: Sequence[int]) -> tuple[Context, int]:
    """Return a context that has read all but the last token of the prompt, and that token."""
    context, prefix = model.open_batch([prompt]), model.prefix(prompt)
    for start in range(0, len(prefix) - 1, PREFILL_CHUNK):
        feed(context, [prefix[:-1][start : start + PREFILL_CHUNK]])
        context.evaluate()
    return context, prefix[-1]


def chosen(context: Context, tokens: mx.array, proposed: int, width: int) -> mx.array:
    """Return the argmax after each token, (1, m) int32."""
    return mx.argmax(context.advance(tokens, proposed).logits[..., :width], axis=-1)


def bare(pair: Pair, prompt: Sequence[int], like: Run, *, drafts: bool) -> Run:
    """Repeat the passes of a run. drafts: Draft with the draft model; else drafts are known."""
    width = pair.vocabulary
    target, last = opened(pair.target, prompt)
    draft = opened(pair.draft, prompt)[0] if drafts else None
    tokens = [last]
    pending = [last]
    ahead: mx.array | None = None
    began = (0.0, 0.0)
    for number, (count, _) in enumerate(like.rounds[:-1]):
        if number == 1:
            began = perf_counter(), thread_time()
        if not count:
            now = ahead if ahead is not None else chosen(target, mx.array([tokens[-1:]]), 0, width)
            ahead = None
            mx.async_eval(now)
            if not like.rounds[number + 1][0]:
                ahead = chosen(target, now, 0, width)
                mx.async_eval(ahead)
            tokens.append(int(now.item()))
            pending.append(tokens[-1])
            continue
        if draft is None:
            known = like.tokens[len(tokens) - 1 :][:count]
            drafted = mx.array([known + [0] * (count - len(known))])
        else:
            drafts_so_far = [chosen(draft, mx.array([pending]), 0, width)[:, -1:]]
            for _ in range(count - 1):
                drafts_so_far.append(chosen(draft, drafts_so_far[-1], 1, width))
            drafted = mx.concatenate(drafts_so_far, axis=1)
        rows = mx.concatenate([mx.array([tokens[-1:]]), drafted.astype(mx.int32)], axis=1)
        best = chosen(target, rows, count, width)
        same = mx.cumprod((best[:, :-1] == drafted).astype(mx.int32), axis=1).sum()
        mx.async_eval(best, same)
        found: Any = best.tolist()[0]
        accepted = min(int(same.item()), like.rounds[number][1])
        tokens += found[: accepted + 1]
        prefix = target.lengths[0] - count + accepted
        target.rewind((prefix,))
        if draft is not None:
            held = min(draft.lengths[0], prefix)
            draft.rewind((held,))
            pending = tokens[len(tokens) - 1 - (prefix - held) :]
    return Run(perf_counter() - began[0], thread_time() - began[1], tokens[1:], like.rounds)


def mlx_lm_plain(network: Any, prompt: Sequence[int], count: int) -> tuple[float, list[int]]:
    """Return the CPU seconds of the Python thread and the tokens of mlx-lm's own loop."""
    from mlx_lm.generate import generate_step

    tokens: list[int] = []
    began = 0.0
    for token, _ in generate_step(mx.array(list(prompt)), network, max_tokens=count):
        began = began or thread_time()
        tokens.append(int(token))
    return thread_time() - began, tokens


def measure(pair: Pair, prompts: Sequence[Sequence[int]], most: int, turns: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    network = None
    if pair.target.kind == "decoder-only" and Path(pair.name).is_dir():
        from mlx_lm.utils import load_model as mlx_lm_load

        network, _ = mlx_lm_load(Path(pair.name))
    for name, settings in METHODS.items():
        if settings.get("proposer") == "draft" and pair.draft is None:
            continue
        options = Options(max_tokens=most, **settings)
        wall, threads = [], []
        for prompt in prompts:
            mine, theirs, cpu = [], [], []
            for turn in range(turns + 1):
                run = ours(pair, prompt, options)
                other = bare(pair, prompt, run, drafts=settings.get("proposer") == "draft")
                if run.tokens != other.tokens:
                    raise SystemExit(f"{name}: another completion: {run.tokens} {other.tokens}")
                if turn:  # the first turn warms up
                    mine.append(run.seconds)
                    theirs.append(other.seconds)
                if network is not None and name == "plain":
                    seconds, _ = mlx_lm_plain(network, prompt, most)
                    if turn:
                        cpu.append(run.thread / seconds)
            wall.append(statistics.median(mine) / statistics.median(theirs))
            threads += cpu
        result[name] = {
            "seconds over bare": round(statistics.median(wall), 3),
            "per prompt": [round(ratio, 3) for ratio in wall],
        }
        if threads:
            result[name]["thread over mlx-lm"] = round(statistics.median(threads), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--real-model", help="a decoder-only model to measure without a draft")
    given = parser.parse_args()
    cases = [*PAIRS]
    if given.real_model:
        cases.append((Path(given.real_model).name, given.real_model, "", "prompts/chat.jsonl"))
    found = {}
    for name, model, draft, file in cases:
        pair = load(str(ROOT / model) if draft else model, str(ROOT / draft) if draft else None)
        texts = [prompt.turns[0] for prompt in read_prompts(ROOT / file)[: given.prompts]]
        options = Options(chat_template=not draft)
        prompts = [encode(pair, text, options) for text in texts]
        found[name] = measure(pair, prompts, given.max_tokens, given.turns)
        print(name, found[name], file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
