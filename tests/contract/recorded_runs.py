"""What the program does, in more than a hundred small runs whose records must not change.

A record has no clock in it. `python benchmarks/record_runs.py` records them again, if a change is
wanted. It leaves out runs with a near tie, where another processor may choose the other token."""

import functools
import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, models, pre_tokenizers

from mlx_specdec import Options, Request, SpecdecError, generate, generate_many, load

from ..support import tiny
from ..support.families import config_of
from .support import ROOT

WEIGHTS = ROOT / "weights"
RECORDED = Path(__file__).with_name("recorded.json")
NEAR_TIE = "near tie"

Records = dict[str, str]
Group = Callable[[Path], Records]


def unchecked(pair: Any, request: Request, result: Any) -> bool:
    """Whether a result has a near tie. The recorder knows; here, none has."""
    return False


has_near_tie = unchecked


def digest(value: object) -> str:
    """A short name of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=6).hexdigest()


def record(pair: Any, request: Request, result: Any, *, counts: bool) -> str:
    """Of a Result: the reason, the number of tokens, their digest, the text's beginning, and what
    was drafted and accepted where the number drafted is fixed."""
    if has_near_tie(pair, request, result):
        return NEAR_TIE
    stats = result.as_dict()["stats"]
    drafts = f" {stats['drafted']}/{stats['accepted']}" if counts else ""
    named = digest([list(result.tokens), result.text])
    return f"{result.finish_reason} {len(result.tokens)} {named}{drafts} {result.text[:16]!r}"


def attempt(make: Callable[[], str]) -> str:
    """What a run gives, or the sentence with which it is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return make()
    except SpecdecError as problem:
        return f"{type(problem).__name__}: {problem}"


def alone(pair: Any, prompt: Any, **settings: Any) -> str:
    """One text by `generate`."""
    counts = settings.get("num_draft", "auto") != "auto"
    options = {"cost_cache": False, "max_tokens": 12, **settings}

    def run() -> str:
        request = Request(prompt, Options(**options))
        return record(pair, request, generate(pair, prompt, request.options), counts=counts)

    return attempt(run)


def together(
    pair: Any, prompts: Sequence[Any], each: Sequence[Mapping[str, Any]], size: int, **common: Any
) -> Records:
    """Several texts by `generate_many`, each with settings of its own."""
    base = {"cost_cache": False, "max_tokens": 12, **common}
    requests = [
        Request(prompt, Options(**{**base, **settings}))
        for prompt, settings in zip(prompts, each, strict=True)
    ]
    results = generate_many(pair, requests, Options(**base), batch_size=size)
    return {
        str(place): record(pair, request, result, counts=False)
        for place, (request, result) in enumerate(zip(requests, results, strict=True))
    }


_SETTINGS = json.loads(Path(__file__).with_name("recorded_settings.json").read_text())
ENGLISH: list[str] = _SETTINGS["english"]
PYTHON: list[str] = _SETTINGS["python"]
SAMPLING: dict[str, dict[str, Any]] = _SETTINGS["sampling"]
SAMPLING["bias"] = {"logit_bias": {7: 3.0, 11: -5.0}}  # JSON has no numbers as keys
DRAFTING: dict[str, dict[str, Any]] = _SETTINGS["drafting"]
RULES: dict[str, dict[str, Any]] = _SETTINGS["rules"]
CONSTRAINTS: dict[str, dict[str, Any]] = _SETTINGS["constraints"]


@functools.cache
def shipped(target: str, draft: str | None) -> Any:
    """A pair of weights/, loaded once a process."""
    return load(str(WEIGHTS / target), str(WEIGHTS / draft) if draft else None)


T5_NAME = "t5-enfr"
"""The shipped target whose passes are cheap. It has all runs of the code that both share."""
DECODER_SAMPLING = ("greedy", "hot", "all-filters", "repetition", "frequency", "stop")
"""Entries of SAMPLING for the other target: all filters at once, and what reads the prompt."""


def shipped_sampling(target: str, draft: str, prompts: list[str]) -> Records:
    """Return records of ways to sample with a draft, and of two of them under all ways to draft."""
    pair = shipped(target, draft)
    return {
        f"{sampling} {drafting}": alone(pair, prompts[0], **how, **who)
        for sampling, how in SAMPLING.items()
        if target == T5_NAME or sampling in DECODER_SAMPLING
        for drafting, who in DRAFTING.items()
        if drafting == "draft-3" or sampling in ("greedy", "hot")
    }


def shipped_rules(target: str, draft: str, prompts: list[str]) -> Records:
    """Rules that depend on the draft, and constraints."""
    pair = shipped(target, draft)
    records = {
        f"{rule} {count} 0": alone(pair, prompts[0], num_draft=count, proposer="draft", **how)
        for rule, how in RULES.items()
        for count in ((2, 5) if target == T5_NAME else (5,))
    }
    for name, how in CONSTRAINTS.items():
        for drafting in ("plain", "draft-3") if target == T5_NAME else ("draft-3",):
            records[f"{name} {drafting}"] = alone(pair, prompts[0], **how, **DRAFTING[drafting])
    return records


def shipped_batches(target: str, draft: str, prompts: list[str]) -> Records:
    """Texts of uneven lengths, ends and settings, together."""
    pair = shipped(target, draft)
    each = [
        {"temperature": 0.0, "max_tokens": 14},
        {"temperature": 1.0, "seed": 3, "max_tokens": 7},
        {"temperature": 0.7, "seed": 9, "top_p": 0.9, "max_tokens": 11, "stop": ["e "]},
        {"regex": "[a-z ]{4,12}", "max_tokens": 9},
        {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2},
    ]
    settings = [prompts[place % len(prompts)] for place in range(len(each))]
    records: Records = {}
    ways = [("plain", 5), ("draft-3", 2), ("draft-3", 5), ("ngram-4", 2)]
    for drafting, size in ways if target == T5_NAME else ways[2:]:
        for key, value in together(pair, settings, each, size, **DRAFTING[drafting]).items():
            records[f"{drafting} of {size}, {key}"] = value
    return records


def shipped_drafters(_: Path) -> Records:
    """Drafters on hidden states and heads."""
    records: Records = {}
    for target, draft, prompts in (
        ("py-llama", "py-llama-dspark", PYTHON),
        ("py-llama-medusa", None, PYTHON),
        ("t5-enfr-medusa", None, ENGLISH),
    ):
        pair = shipped(target, draft)
        for count, temperature, place in ((3, 0.0, 0), (5, 0.0, 1), (1, 1.0, 1), (3, 1.0, 0)):
            name = f"{draft or target} {count} {temperature:g} {place}"
            settings = {"num_draft": count, "temperature": temperature}
            records[name] = alone(pair, prompts[place], seed=place, **settings)
    return records


FAMILIES = ("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "mamba2", "qwen3_next")
"""A family with each kind of cache. What families compute is checked in test_configurations.py, and
what drafts change in test_families.py."""
IDS = [5, 9, 12, 7, 33, 21, 8]


def words(directory: Path, size: int) -> None:
    """A tokenizer of so many words, w0, w1, ..."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))


def on_disk(name: str, directory: Path) -> tuple[Path, Path]:
    """A tiny target and a draft that is often but not always right, as directories."""
    config = config_of(name)
    network = tiny.from_config(config)
    found = []
    for part in ("target", "draft"):
        home = directory / f"{name}-{part}"
        home.mkdir(parents=True)
        (home / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
        words(home, config["vocab_size"])
        if part == "draft":
            network.update(tree_map(moved, network.parameters()))
        weights = dict(tree_flatten(network.parameters()))
        mx.save_safetensors(str(home / "model.safetensors"), weights, {"format": "mlx"})
        found.append(home)
    return found[0], found[1]


def moved(array: mx.array) -> mx.array:
    """The weights, changed a little and always alike."""
    if not mx.issubdtype(array.dtype, mx.floating) or array.ndim < 2:
        return array
    return array * (1 + 0.2 * mx.sin(1000 * array))


def family(name: str, directory: Path) -> Records:
    """One architecture: alone, drafted, in a batch, cut."""
    target, draft = on_disk(name, directory)
    warnings.simplefilter("ignore", RuntimeWarning)
    pair = load(str(target), str(draft))
    records = {
        "greedy": alone(pair, IDS, frequency_penalty=2.0, regular=True),
        "drafted": alone(pair, IDS, frequency_penalty=2.0, num_draft=3),
        "block": alone(pair, IDS, temperature=0.8, seed=5, num_draft=3, rule="block"),
        "ngram": alone(pair, [*IDS, *IDS], temperature=0.3, num_draft=4, proposer="ngram"),
    }
    each = [{"temperature": 1.0, "seed": 1}, {"max_tokens": 5}, {"temperature": 0.6, "seed": 2}]
    arguments = [IDS, IDS[:2], [*IDS, *IDS[1:]]]
    for key, value in together(pair, arguments, each, 2, num_draft=3).items():
        records[f"batch {key}"] = value
    return records


GROUPS: dict[str, Group] = {
    **{
        f"{target} {kind}": lambda _, make=make, target=target, draft=draft, prompts=prompts: make(
            target, draft, prompts
        )
        for target, draft, prompts in (
            ("py-llama", "py-llama-draft", PYTHON),
            (T5_NAME, "t5-enfr-draft", ENGLISH),
        )
        for kind, make in (
            ("sampling", shipped_sampling),
            ("rules", shipped_rules),
            ("batches", shipped_batches),
        )
    },
    "drafters": shipped_drafters,
    **{f"family {name}": functools.partial(family, name) for name in FAMILIES},
}


SHIPPED = tuple(name for name in GROUPS if not name.startswith("family "))
"""Groups of shipped models, whose products take the most time."""


def differences(name: str, home: Path) -> dict[str, list[str]]:
    """Run a group. Return what was found and what is recorded for each run that differs."""
    recorded, found = json.loads(RECORDED.read_text())[name], GROUPS[name](home)
    apart = {key: [found.get(key, ""), value] for key, value in recorded.items()}
    return {key: both for key, both in apart.items() if both[0] != both[1]}


def main(names: Sequence[str]) -> int:
    """Print the differences of groups as JSON, and return the exit code."""
    wrong = {}
    for name in names:
        with tempfile.TemporaryDirectory() as home:
            if apart := differences(name, Path(home)):
                wrong[name] = apart
    print(json.dumps(wrong, indent=1, ensure_ascii=False))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
