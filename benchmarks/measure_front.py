"""Measure the figures of the front pages again, and write them into their file and the pages.

    python benchmarks/measure_front.py [--repeats 5] [--file benchmarks/results/2026-11-29.json]

Run it on a quiet machine; it takes about ten minutes on two cores. It measures six draft lengths
from 0 to 8 and `auto` with both shipped pairs, on prompts that they were not trained on. It also
runs the examples of docs/ whose output has a speed. It replaces the tables and these outputs in
README.md and docs/. `tests/test_figures.py` compares pages and file."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fill_pairs

ROOT = Path(__file__).resolve().parents[1]
PAIRS = {
    "translation": "prompts/translation.jsonl",
    "Python": "prompts/python.jsonl --limit 12 --max-tokens 80 --model weights/py-llama "
    "--draft-model weights/py-llama-draft",
}
"""The arguments of `bench` for each pair."""
LENGTHS = "1,2,3,5,8,auto"
NAMES = {"draft auto": "auto", "auto": "auto, with lookup"}
"""Methods of `bench` with another name in the tables."""
EXAMPLES = ("platforms", "drafters", "batching", "encoder-decoders")
"""Pages with an example whose output has a speed."""
STATISTICS = re.compile(
    r"(?m)^(\d+ tokens in|\d+ texts, \d+ tokens in|\d+ of \d+ draft tokens accepted"
    r"|prompt: \d+ tokens in) .*$"
)
SPEED = re.compile(r"tokens in [\d.]+ s, ([\d.]+) tokens/s")


def run(*words: str, inside: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the program in a directory that sees weights/ and prompts/, and return the result."""
    command = [sys.executable, "-m", "mlx_specdec", *words]
    return subprocess.run(command, cwd=inside, capture_output=True, text=True, check=True)


def measured(repeats: int) -> dict[str, Any]:
    """Return the figures of both pairs by draft length, and where they were measured."""
    found: dict[str, Any] = {}
    for name, flags in PAIRS.items():
        words = ["bench", *flags.split(), "--num-draft", LENGTHS, "--repeats", str(repeats)]
        result = json.loads(run(*words, "--json", "--no-cost-cache").stdout)
        found[name] = {}
        for one in result["methods"]:
            if one["differences"]:
                raise SystemExit(f"{name}, {one['name']}: an output differs from plain decoding's")
            figures: dict[str, Any] = {"speedup": round(one["speed_up"], 2)}
            if one["name"] == "plain":
                figures["tokens_per_second"] = round(one["tokens_per_second"])
            else:
                figures["interval"] = [round(end, 2) for end in one["spread"]]
            figures["acceptance_length"] = round(one["tokens_per_round"], 2)
            label = NAMES.get(one["name"], one["name"].removeprefix("draft "))
            found[name][label] = figures
        found["setting of bench"] = result["setting"]
    return found


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def readme_table(figures: dict[str, Any]) -> str:
    """Return README's table: speedups by draft length, and with lookup."""
    lengths = [one for one in figures["translation"] if one not in ("plain", "auto")]
    rows = []
    for name in PAIRS:
        speeds = [f"{figures[name][one]['speedup']:.2f}" for one in ("plain", *lengths)]
        rows.append([name, *speeds])
    return markdown(["draft tokens", "0", *lengths], rows)


def performance_table(figures: dict[str, Any]) -> str:
    """Return the table of docs/performance.md, with acceptance lengths."""
    head = ["draft tokens"]
    for name in PAIRS:
        head += [name, "acceptance length"]
    rows = []
    for length in figures["translation"]:
        row = [length]
        for name in PAIRS:
            one = figures[name][length]
            if length == "plain":
                row.append(f"{one['tokens_per_second']} tokens/s")
            else:
                low, high = one["interval"]
                row.append(f"{one['speedup']:.2f} ({low:.2f} to {high:.2f})")
            row.append(f"{one['acceptance_length']:.2f}")
        rows.append(row)
    return markdown(head, rows)


def section(page: Path, heading: str) -> tuple[int, int]:
    """Return where a section of a page begins and ends."""
    text = page.read_text("utf-8")
    begin = text.index(f"\n## {heading}\n")
    end = text.find("\n## ", begin + 1)
    return begin, len(text) if end < 0 else end


def replace_in(page: Path, heading: str, changes: dict[str, str], table: str) -> None:
    """Replace texts and the table in a section of a page."""
    begin, end = section(page, heading)
    text = page.read_text("utf-8")
    body = re.sub(r"(?m)^\|.*\|\n(\|.*\|\n)+", lambda _: f"{table}\n", text[begin:end], count=1)
    for old, new in changes.items():
        body = body.replace(old, new)
    page.write_text(text[:begin] + body + text[end:], "utf-8")


def refresh_example(page: Path) -> float:
    """Run the first example of a page whose output has a speed, write the new lines of statistics
    into the page, and return the tokens per second."""
    text = page.read_text("utf-8")
    [block] = [one for one in re.findall(r"(?ms)^```\n\$ .*?^```", text) if SPEED.search(one)][:1]
    with tempfile.TemporaryDirectory() as place:
        inside, done = Path(place), None
        for name in ("weights", "prompts"):
            (inside / name).symlink_to(ROOT / name)
        for line in re.findall(r"(?m)^\$ (.*)$", block):
            if not line.startswith("mlx-specdec "):
                subprocess.run(["bash", "-c", line], cwd=inside, check=True, capture_output=True)
                continue
            words = shlex.split(line)[1:]
            for _ in range(2):  # the second run is warm
                (inside / "translations.jsonl").unlink(missing_ok=True)
                done = run(*words, inside=inside)
    assert done is not None
    fresh = iter([one.group() for one in STATISTICS.finditer(done.stderr)])
    page.write_text(text.replace(block, STATISTICS.sub(lambda _: next(fresh), block)), "utf-8")
    found = SPEED.search(done.stderr)
    assert found is not None, done.stderr
    return float(found[1])


def fill_table_of_pairs(figures: dict[str, Any]) -> None:
    """Write the gains of both pairs into pairs.json."""
    table = json.loads(fill_pairs.TABLE.read_text("utf-8"))
    names = {"weights/t5-enfr": "translation", "weights/py-llama": "Python"}
    for pair in table["pairs"]:
        if pair["target"] in names and pair.get("gains"):
            gain = figures[names[pair["target"]]]["auto"]["speedup"]
            pair["gains"] = {"16": {"chat": gain, "code": gain}}
    table["sources"]["here"] |= {"date": figures["date"], "machine": figures["where"]}
    fill_pairs.TABLE.write_text(json.dumps(table), "utf-8")
    fill_pairs.main()


def write_pages(data: dict[str, Any], changes: dict[str, str]) -> None:
    figures = data["measurements"]["shipped pairs"]
    replace_in(ROOT / "README.md", "Figures", changes, readme_table(figures))
    replace_in(
        ROOT / "docs" / "performance.md", "Single sequences", changes, performance_table(figures)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--file", type=Path, default=ROOT / "benchmarks/results/2026-11-29.json")
    args = parser.parse_args()
    data = json.loads(args.file.read_text("utf-8"))
    old = data["measurements"]["shipped pairs"]
    new = measured(args.repeats)
    setting = new.pop("setting of bench")
    cores = {1: "one core", 2: "two cores"}.get(os.cpu_count() or 1, f"{os.cpu_count()} cores")
    system, blas = setting["system"].partition(" ")[0], str(setting["blas"]).upper()
    where = f"{cores} of an {setting['machine']} ({system}, {setting['dtype']}, {blas})"
    facts = {
        "date": str(setting["date"])[:10],
        "where": where,
        "brackets": f"the spread of {args.repeats} repeats",
        "repeats": f"{args.repeats} repeats",
    }
    changes = {str(old[key]): value for key, value in facts.items() if old[key] != value}
    data["measurements"]["shipped pairs"] = {**old, **facts, **new}
    data["measurements"]["examples"] |= {
        "date": facts["date"],
        "where": where,
        "tokens_per_second": {
            page: refresh_example(ROOT / "docs" / f"{page}.md") for page in EXAMPLES
        },
    }
    args.file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", "utf-8")
    write_pages(data, changes)
    fill_table_of_pairs(data["measurements"]["shipped pairs"])
    print(f"wrote {args.file}, the pages and pairs.json")


if __name__ == "__main__":
    main()
