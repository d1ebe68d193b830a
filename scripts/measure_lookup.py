"""Index a large text for lookup: seconds; bytes a token on disk, resident, at the peak; query time.

    python scripts/measure_lookup.py --megabytes 100 --model weights/py-llama

The text is this Python's standard library, again and again, with other names each time (seeded).
Queries are the ends of texts that are not among it, the library with names of yet another draw;
they are timed one by one, each once, after as many others. Building and searching run in processes
of their own. Resident is what the process holds more than before it opened the index, mapped file
included (Linux). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_specdec import user_cache
from mlx_specdec.drafting import document_cache
from mlx_specdec.drafting.document_cache import IndexKey
from mlx_specdec.text import documents
from mlx_specdec.text.tokenizer import load_tokenizer

NAME = re.compile(r"[A-Za-z_]{4,}")
RENAMED = 0.2
CONTEXT = 64
DRAFTED = 8


def library(seed: int) -> Iterator[str]:
    """The files of the standard library; all but seed 0 have some names changed, the same ones to
    the same ones within a file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    known: list[str] = []
    draw = random.Random(seed)
    for file in files:
        if "site-packages" in file.parts:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if "\0" in text:
            continue
        if seed:
            known = (known + sorted(set(NAME.findall(text))))[-20_000:]
            names = {name: name for name in set(NAME.findall(text))}
            for name in sorted(names):
                if draw.random() < RENAMED:
                    names[name] = draw.choice(known)
            text = NAME.sub(lambda found, names=names: names[found.group()], text)
        yield text


def write_text(file: Path, nbytes: int) -> None:
    """A document of so many bytes, or a little less."""
    left = nbytes
    with file.open("wb") as stream:
        for seed in range(10_000):
            for text in library(seed):
                content = text.encode()
                if len(content) > left:
                    return
                stream.write(content)
                left -= len(content)


def resident() -> int:
    """Bytes of memory, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def key_of(model: Path, file: Path) -> tuple[Any, IndexKey]:
    """The tokenizer, and what the index is kept under."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    encoder = config.get("is_encoder_decoder") or "t5" in config["model_type"]
    tokenizer = load_tokenizer(model, kind="encoder-decoder" if encoder else "decoder-only")
    width = min(config["vocab_size"], tokenizer.size)
    return tokenizer, IndexKey(documents.digest([file]), tokenizer.digest, width)


def build(model: Path, file: Path) -> dict[str, Any]:
    """Build the index as `with_documents` does."""
    tokenizer, key = key_of(model, file)
    tokenizer.encode("warm")
    before, begin, cpu = resident(), time.perf_counter(), time.process_time()
    read = documents.tokens([file], tokenizer, shown("tokenizing"))
    tokenized, tokenized_cpu = time.perf_counter(), time.process_time()
    index = document_cache.build(key, read)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tokens": len(index),
        "tokenize_seconds": round(tokenized - begin, 1),
        "tokenize_cpu_seconds": round(tokenized_cpu - cpu, 1),
        "sort_and_write_seconds": round(time.perf_counter() - tokenized, 1),
        "sort_and_write_cpu_seconds": round(time.process_time() - tokenized_cpu, 1),
        "bytes_a_token_at_peak": round((peak - before) / len(index), 2),
        "bytes_a_token_on_disk": round(
            sum(each.stat().st_size for each in user_cache.directory("documents").iterdir())
            / len(index),
            2,
        ),
    }


def shown(what: str) -> Any:
    """Progress in steps of a tenth."""
    told = -1

    def report(done: int, total: int) -> None:
        nonlocal told
        if 10 * done // total > told:
            told = 10 * done // total
            print(f"{what} {10 * told} %", file=sys.stderr, flush=True)

    return report


def search(model: Path, file: Path, count: int) -> dict[str, Any]:
    """Open the index and search it `count` times, after as many times for other texts."""
    tokenizer, key = key_of(model, file)
    texts: list[list[int]] = []
    draw = random.Random(1)
    for text in library(20_000):
        if len(texts) == 2 * count:
            break
        ids = tokenizer.encode(text[:20_000])
        if len(ids) > 2 * CONTEXT:
            ends = (draw.randrange(CONTEXT, len(ids)) for _ in range(10))
            texts += [ids[end - CONTEXT : end] for end in ends]
    draw.shuffle(texts)
    before, begin = resident(), time.perf_counter()
    index = document_cache.read(key)
    opened = time.perf_counter() - begin
    if index is None:
        sys.exit("the index was not kept: is there room in the temporary directory?")
    lengths, took = [], []
    for number, text in enumerate(texts):
        begin = time.perf_counter()
        found = index.find(text)
        index.following(found, DRAFTED)
        if number >= len(texts) // 2:
            took.append(1e6 * (time.perf_counter() - begin))
            lengths.append(found.length)
    return {
        "open_seconds": round(opened, 2),
        "bytes_a_token_resident": round((resident() - before) / len(index), 2),
        "queries": len(took),
        "median_query_microseconds": round(statistics.median(took), 1),
        "p90_query_microseconds": round(statistics.quantiles(took, n=10)[-1], 1),
        "median_match_tokens": statistics.median(lengths),
    }


def in_a_process(part: str, asked: argparse.Namespace, file: Path) -> dict[str, Any]:
    """One part of the measurement, in a process of its own."""
    options = ["--model", str(asked.model), "--queries", str(asked.queries)]
    run = [sys.executable, __file__, "--part", part, "--file", str(file), *options]
    found = subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(found)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--model", type=Path, default=Path("weights/py-llama"))
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--part", choices=["build", "search"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part == "build":
        print(json.dumps(build(asked.model, asked.file)))
    elif asked.part == "search":
        print(json.dumps(search(asked.model, asked.file, asked.queries)))
    else:
        with tempfile.TemporaryDirectory() as name:
            os.environ[user_cache.PLACE] = name
            file = Path(name) / "text.py"
            write_text(file, int(1e6 * asked.megabytes))
            found = {"bytes": file.stat().st_size, "load": os.getloadavg()[0]}
            found |= in_a_process("build", asked, file)
            found |= in_a_process("search", asked, file)
            for what, value in found.items():
                print(f"{what.replace('_', ' ')}: {value}")
            print(json.dumps(found))


if __name__ == "__main__":
    main()
