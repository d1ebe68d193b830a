"""Compare what a published model writes on this machine with stored references, for mac.sh:

    python scripts/mac_real.py SmolLM2-135M-Instruct.Q4_1.gguf [--small]

The references are greedy outputs of transformers in float32, tests/real/smollm2.json. Each way to
decode writes them in float32, bfloat16 and with the file's 4-bit weights, with and without
`--exact`. Prints a line of JSON for each combination. The line counts the outputs that equal the
reference, and those that equal plain decoding here. For each other output it has the position of
the first difference and the margin there. Kernels that round in another order explain small
margins. A large margin is a fault."""

import argparse
import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx_specdec import system

system.load_blas()

from mlx_specdec import Options, generate, generate_many, load  # noqa: E402
from mlx_specdec.checkpoints.files import read_config  # noqa: E402
from mlx_specdec.checkpoints.source import as_directory  # noqa: E402
from mlx_specdec.training.draft import shaped  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.margins import compare, find_parting  # noqa: E402

FORMATS = {
    "float32": ["--dtype", "float32", "--expand-weights"],
    "bfloat16": ["--dtype", "bfloat16", "--expand-weights"],
    "4-bit": ["--dtype", "bfloat16", "--no-expand-weights"],
}
"""Flags of each format; the first is the references' own. The file's numbers have 4 bits in layers
and 8 in the embedding."""
LAYERS = 29
"""Number of the target's 30 layers that draft. They are often right."""
MOST_DRAFTED = 3
Tokens = Sequence[int]


def loaded(model: str, flags: list[str]) -> Any:
    return load(model, dtype=flags[1], expand_weights="--expand-weights" in flags)


def served(model: str, flags: list[str], questions: list[str], most: int) -> list[str]:
    """Return the texts with which a server answers all questions at once."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from served import serving

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_specdec", "serve", "--model", model, *flags]
    drafts = ["--no-cost-cache", "--proposer", "ngram", "--num-draft", str(MOST_DRAFTED)]
    with ExitStack() as stack:
        server = stack.enter_context(serving([*command, *drafts, "--port", str(port)], port))

        def answer(question: str) -> str:
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": most}
            path = "/v1/chat/completions"
            status, content = server.ask("POST", path, json.dumps(body).encode())
            if status != 200:
                raise RuntimeError(f"{status}: {content[:300]!r}")
            return json.loads(content)["choices"][0]["message"]["content"]

        return list(stack.enter_context(ThreadPoolExecutor(8)).map(answer, questions))


def outputs(
    model: str, pair: Any, flags: list[str], completions: list[dict[str, Any]], options: Options
) -> Iterator[tuple[str, list[Tokens]]]:
    """Yield each way to decode, and the token ids that it writes. Plain decoding comes first."""
    prompts = [one["prompt"] for one in completions]
    lookup = replace(options, regular=False, proposer="ngram", num_draft=MOST_DRAFTED)

    def each(pair: Any, options: Options) -> list[Tokens]:
        return [generate(pair, prompt, options).tokens for prompt in prompts]

    def batch() -> list[Tokens]:
        return [one.tokens for one in generate_many(pair, prompts, lookup, batch_size=len(prompts))]

    def server() -> list[Tokens]:
        questions = [one["question"] for one in completions]
        texts = served(
            model, [*flags, *(["--exact"] * options.exact)], questions, options.max_tokens
        )
        return [pair.tokenizer.encode(text) for text in texts]

    with as_directory(Path(model)) as directory:
        draft, _ = shaped(pair.target, read_config(directory), LAYERS)
    layers = replace(pair, draft=draft, draft_name=f"{LAYERS} layers")
    ways: dict[str, Callable[[], list[Tokens]]] = {
        "plain": partial(each, pair, options),
        "lookup": partial(each, pair, lookup),
        f"{LAYERS} layers": partial(each, layers, replace(lookup, proposer="draft")),
        "batch": batch,
        "served": server,
    }
    for way, made in ways.items():
        yield way, made()


def parting(pair: Any, options: Options, prompt: Tokens, one: Tokens, other: Tokens) -> dict:
    """Return where two outputs differ first, and the margin there in this machine's numbers."""
    found = compare(pair, options, prompt, one, other)
    return {"position": found.position, "margin": found.margin, "tie": found.tie}


def checked(
    model: str, name: str, completions: list[dict[str, Any]], most: int, *, exact: bool
) -> Iterator[dict[str, Any]]:
    """Yield a line for each way to decode in one format."""
    flags = FORMATS[name]
    pair = loaded(model, flags)
    options = Options(max_tokens=most, regular=True, cost_cache=False, exact=exact)
    ends = pair.eos_token_ids
    plain: list[Tokens] = []
    for way, tokens in outputs(model, pair, flags, completions, options):
        # Texts of a server lack the token that ends them.
        tokens = [[id for id in ids if id not in ends] for ids in tokens]
        plain = plain or tokens
        from_reference, from_plain = [], []
        for one, ids, regular in zip(completions, tokens, plain, strict=True):
            stored = [id for id in one["tokens"][:most] if id not in ends]
            if ids != stored:
                at = find_parting((), ids, stored).position
                best, second = (value for _, value in one["likeliest"][at][:2])
                from_reference.append({"position": at, "margin": round(best - second, 4)})
            if ids != regular:
                from_plain.append(parting(pair, options, one["prompt"], regular, ids))
        yield {
            "kind": "real",
            "format": name,
            "exact": exact,
            "way": way,
            "outputs": len(tokens),
            "as_reference": len(tokens) - len(from_reference),
            "as_plain": len(tokens) - len(from_plain),
            "from_reference": from_reference,
            "from_plain": from_plain,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="the file that real_models.sh smollm2 has downloaded")
    parser.add_argument("--small", action="store_true", help="short outputs, in float32")
    given = parser.parse_args()
    references = json.loads((ROOT / "tests" / "real" / "smollm2.json").read_text("utf-8"))
    completions, most = references["completions"], 40
    if given.small:
        completions, most = completions[:2], 8
    for name in list(FORMATS)[: 1 if given.small else None]:
        for exact in (False, True):
            for line in checked(given.model, name, completions, most, exact=exact):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
