"""Put the summary of a report of mac.sh at its beginning, in words, on one page.

    python scripts/mac_summary.py mac-report.txt

The rest of the file stays, except for paths with the user's name. A second call writes the
summary again.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTH = 100
PRODUCT_ROWS, ATTENTION_ROWS = 12, 8
"""Most rows of the passes that mac_checks.py compares."""
EXACT_ROWS = 5
"""Most rows of a pass with --exact: 4 draft tokens and the token before them."""
STEP = 1.25
"""Ratio of two neighbouring costs above which more rows cost a step. Noise stays below."""
GAIN = 0.95
"""Ratio of times that counts as a gain, as in `models/mlx_lm/attention.py`."""
CUT = re.compile(r"^\(ended with code (\d+);", re.M)
"""The line that mac.sh writes if a part fails or is cut."""
TIES = (
    "In half precision and on M3 or later, outputs may differ at ties, because kernels sum one row "
    "and several rows in different orders. That is no bug. `--exact` avoids it."
)
Found = dict[str, Any]


@dataclass
class Report:
    """A report's parts by their titles: the raw text and the JSON objects in it."""

    parts: dict[str, str]
    objects: dict[str, list[Found]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Report:
        """Divide the text of a report; what comes before the first part is left out."""
        parts = {}
        for part in text.split("\n== ")[1:]:
            title, _, content = part.partition("\n")
            parts[title] = content
        return cls(parts, {title: list(_objects(part)) for title, part in parts.items()})

    def kind(self, kind: str) -> list[Found]:
        """Return the lines of mac_checks.py of one kind."""
        lines = (line for part in self.objects.values() for line in part)
        return [line for line in lines if line.get("kind") == kind]


def _objects(part: str) -> Iterable[Found]:
    for line in part.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:  # the part was cut in the middle of a line
                return


# ------------------------------------------------------------------ one question each


def machine(report: Report) -> list[str]:
    """Name the chip, the memory, the system, the versions and the power mode."""
    text = report.parts.get("machine", "")
    lines = dict(re.findall(r"^[ \t]*(\S+?):?[ \t]+(.+)$", text, re.M))
    found = (report.objects.get("memory limits") or [{}])[0]
    device, versions = found.get("device", {}), found.get("versions", {})
    chip = lines.get("machdep.cpu.brand_string") or device.get("device_name", "unknown chip")
    system = f"macOS {lines['ProductVersion']}" if "ProductVersion" in lines else "no macOS"
    sentences = [f"{chip} ({device.get('architecture', '?')}), {system}."]
    if versions:
        sentences.append(", ".join(f"{name} {one}" for name, one in versions.items()) + ".")
    if found:
        usable, memory = (found[name] / 2**30 for name in ("usable", "memory"))
        sentences.append(f"Models may take {usable:.1f} of {memory:.1f} GiB.")
    if "lowpowermode" in lines:
        on = lines["lowpowermode"].strip() != "0"
        sentences.append("Low-power mode is on: times are not typical." if on else "")
    return [" ".join(filter(None, sentences))]


def limit(lines: Sequence[Found], key: str) -> int:
    """Return the largest M for which all passes of 2 to M rows are equal in every line, or 1."""
    common = set.intersection(*(set(line[key]) for line in lines))
    most = 1
    while most + 1 in common:
        most += 1
    return most


def _by(lines: Iterable[Found], key: str) -> dict[str, list[Found]]:
    groups = defaultdict(list)
    for line in lines:
        groups[line[key]].append(line)
    return groups


def _named(limits: dict[str, int], most: int) -> str:
    """Say up to how many rows each format is equal; formats with equal findings go together."""
    groups = defaultdict(list)
    for name, rows in limits.items():
        groups[rows].append(name)
    if list(groups) == [most]:
        return f"in passes of 2 to {most} rows in all formats"
    largest = max(groups.values(), key=len)
    said = []
    for rows, names in sorted(groups.items()):
        others = len(groups) > 1 and names is largest and len(names) > 2
        formats = "all other formats" if others else "; ".join(names)
        said.append(f"{_reach(rows, most)} in {formats}")
    return ", ".join(said)


def _reach(rows: int, most: int) -> str:
    if rows == most:
        return f"in passes of 2 to {most} rows"
    return f"up to {rows} rows but not {rows + 1}" if rows > 1 else "in no pass of 2 and more rows"


def exactness(report: Report) -> list[str]:
    """Say whether --exact holds: it computes at least 2 rows, and attention row by row."""
    lines = _by(report.kind("rows"), "operation")
    products, attention = _by(lines["product"], "format"), lines["attention"]
    if not products or not attention:
        return []
    two, every, one = (
        {name: limit(group, key) for name, group in products.items()}
        for key in ("row_0_as_two_rows", "rows_as_two_rows", "row_0_as_one_row")
    )
    divided = sum(limit([line], "divided_rows_as_one_row") == ATTENTION_ROWS for line in attention)
    worst = min(every.values())
    names = "; ".join(name for name, rows in every.items() if rows == worst)
    if divided == len(attention) and worst >= EXACT_ROWS:
        verdict = f"--exact holds on this machine: its passes have 2 to {EXACT_ROWS} rows."
    elif divided == len(attention) and worst > 1:
        verdict = (
            f"--exact does not hold on this machine with more than {worst - 1} draft tokens: its "
            f"passes may have up to {EXACT_ROWS} rows (see {names})."
        )
    else:
        verdict = "--exact does not hold on this machine."
    counts = ", ".join(
        f"{sum(rows in line['row_0_as_one_row'] for line in attention)} with {rows} rows"
        for rows in (2, 5, 8)
    )
    sentences = [
        verdict,
        f"Products: row 0 has the bits of 2 rows {_named(two, PRODUCT_ROWS)}.",
        f"Products: every row has the bits of 2 rows {_named(every, PRODUCT_ROWS)}.",
        f"Products: row 0 has the bits of 1 row {_named(one, PRODUCT_ROWS)}.",
        f"Attention divided into single rows has the bits of 1 row in {divided} of "
        f"{len(attention)} cases; row 0 of an undivided call has them in {counts}.",
    ]
    if CUT.search(report.parts.get("bits of rows", "")):
        sentences.append("The comparison was cut: it lacks some formats or sizes.")
    return [sentence for sentence in sentences if two != every or "every row" not in sentence]


def float32(report: Report) -> list[str]:
    """Say whether MLX computes products of several float32 rows in TF32."""
    lines = {line["tf32"]: line for line in report.kind("float32")}
    if len(lines) < 2:
        return []
    off, on = lines[False]["error"], lines[True]["error"]
    sums = f"A float32 product of 5 rows is off by {off:.1e} without TF32 and by {on:.1e} with it"
    if on > 10 * off:
        return [f"{sums}: this machine has TF32, and MLX_ENABLE_TF32=0 switches it off."]
    if off > 1e-5:
        return [f"{sums}: MLX_ENABLE_TF32=0 does not switch TF32 off here."]
    return [f"{sums}: TF32 makes no difference here."]


def outputs(report: Report) -> list[str]:
    """Count the drafted outputs that equal plain decoding's, and name the fastest methods."""
    said, same, compared = [], 0, 0
    for title, objects in report.objects.items():
        for bench in (one for one in objects if "methods" in one):
            drafted = [one for one in bench["methods"] if one["family"] != "plain"]
            equal = sum(one["compared"] - len(one["differences"]) for one in drafted)
            total = sum(one["compared"] for one in drafted)
            values = {one["name"]: one["speed_up"] for one in drafted}
            speeds = {name: value for name, value in values.items() if value is not None}
            if not speeds:
                continue
            best = max(speeds, key=lambda name: speeds[name])
            said.append(
                f"{title}: {equal} of {total} outputs are the same; {best} is fastest with "
                f"{speeds[best]:.2f} times plain decoding"
            )
            autos = {name: value for name, value in speeds.items() if name.endswith("auto")}
            for name, value in autos.items():
                rest = [v for other, v in speeds.items() if other.split()[0] == name.split()[0]]
                if value < GAIN * max(*rest, 1.0):
                    said[-1] += f", but {name} reaches only {value:.2f}"
            same, compared = same + equal, compared + total
    if not said:
        return []
    if compared > same:
        said.append(f"{compared - same} of {compared} outputs differ from plain decoding's")
    return [*(f"{one}." for one in said), TIES]


def real(report: Report) -> list[str]:
    """Count the outputs of SmolLM2 that equal the references and plain decoding's."""
    groups = defaultdict(list)
    for line in report.kind("real"):
        groups[line["format"] + ", --exact" * line["exact"]].append(line)
    if not groups:
        return ["SmolLM2 was not there in time: run ./scripts/real_models.sh smollm2 before this."]
    said = []
    for name, lines in groups.items():
        outputs = sum(line["outputs"] for line in lines)
        references, plain = (
            f"{sum(line[f'as_{other}'] for line in lines)} of {outputs} equal {words}"
            + _margins([one for line in lines for one in line[f"from_{other}"]])
            for other, words in (("reference", "the references"), ("plain", "plain decoding's"))
        )
        said.append(f"{name}: {references}, and {plain}.")
    return said


def _margins(differences: list[Found]) -> str:
    found = [one["margin"] for one in differences if one["margin"] is not None]
    return f" (margins at the others' first difference up to {max(found):.2g})" if found else ""


def contexts(report: Report) -> list[str]:
    """List the speed of the Python pair after longer prompts."""
    speeds = [
        f"{one['stats']['tokens_per_second']:.0f} after {one['prompt_tokens']:,}"
        for objects in report.objects.values()
        for one in objects
        if "prompt_tokens" in one
    ]
    return [f"Tokens a second after prompts of that many tokens: {', '.join(speeds)}."] * bool(
        speeds
    )


def submission(report: Report) -> list[str]:
    """Compare each way of submission with the default, by the fastest of its runs."""
    runs = _by(report.kind("submission"), "setting")
    if "default" not in runs:
        return []
    said = []
    for setting, lines in runs.items():
        ratios = []
        for way in ("plain_ms", "drafted_ms"):
            times, usual = ([line[way] for line in some] for some in (lines, runs["default"]))
            apart = max(times) < min(usual) or max(usual) < min(times)
            noise = "" if apart and len(times) > 1 else ", within noise"
            ratio = min(times) / min(usual)
            ratios.append(f"{ratio:.2f} {way.removesuffix('_ms')}{noise}")
        if setting != "default":
            said.append(f"{setting} ({'; '.join(ratios)})")
    text = f"Time of a token as a ratio to the default: {', '.join(said)}."
    return [f"{text} A setting pays below {GAIN}. A CPU ignores all settings."]


def sorting(report: Report) -> list[str]:
    """List the times of sorting and filtering."""
    return [
        f"Milliseconds over {line['rows']} x 151,936 logits: "
        + ", ".join(f"{name} {ms:.2f}" for name, ms in line["ms"].items())
        + "."
        for line in report.kind("sorting")
    ]


def kernels(report: Report) -> list[str]:
    """Say from which number of rows products cost a step more, and whether division pays."""
    cells = [
        cell for part in report.objects.values() for one in part for cell in one.get("cells", ())
    ]
    said = []
    for bits, row in _by([cell for cell in cells if cell["kind"] == "product"], "bits").items():
        steps = [
            f"{after['rows']} ({after['of_one_row']:.1f})"
            for before, after in pairwise(row)
            if after["of_one_row"] > STEP * before["of_one_row"]
        ]
        said.append(f"{bits}-bit weights at {', '.join(steps) or 'no number of'} rows")
    sentences = []
    if said:
        sentences.append(
            f"Products cost a step more (times one row): {'; '.join(said)}. Drafts should stop "
            "before a step."
        )
    both = [cell for cell in cells if "divided_ms" in cell]
    if both:
        pays = [cell["keys"] for cell in both if cell["divided_ms"] < GAIN * cell["ms"]]
        least = f", from {min(pays):,} keys on" if pays else ""
        ratio = median(cell["divided_ms"] / cell["ms"] for cell in both)
        sentences.append(
            f"Dividing attention pays in {len(pays)} of {len(both)} cases{least}; the median is "
            f"{ratio:.2f} of the time."
        )
    return sentences


def streams(report: Report) -> list[str]:
    """Say whether two streams got their texts, and what memory the server took."""
    said = []
    for line in report.kind("streams"):
        wired = "with the highest wired limit" if line["wired"] else "without a wired limit"
        code, problems = line["server_ended_with"], line["problems"]
        well = code is None and not problems and all(line["texts"])
        texts = " and ".join(map(str, line["texts"]))
        text = f"Two streams for {line['seconds']:.0f} s {wired} got {texts} texts"
        text += ", and nothing failed" if well else f"; {'; '.join(problems) or 'that is too few'}"
        text += "" if code is None else f"; the server ended with {code}"
        before, after = line["memory_before"], line["memory_after"]
        if after:
            text += (
                f"; the server took {before['resident_bytes'] / 2**20:.0f} MiB at the start and "
                f"{after['resident_bytes'] / 2**20:.0f} MiB at the end"
            )
            if after["footprint"]:
                text += f" (footprint {before['footprint']} and {after['footprint']})"
        said.append(f"{text}.")
    return said


def failures(report: Report) -> list[str]:
    """Name the parts that failed or were cut."""
    codes = {title: found[1] for title, part in report.parts.items() if (found := CUT.search(part))}
    if not codes:
        return [f"All {len(report.parts)} parts ran to their ends."]
    named = ", ".join(
        f"{title} ({'cut at its time limit' if code == '142' else f'code {code}'})"
        for title, code in codes.items()
    )
    return [f"These parts did not run to their ends: {named}."]


SECTIONS = {
    "Machine": machine,
    "Does --exact hold?": exactness,
    "Float32": float32,
    "Same output, and speed": outputs,
    "A published model, SmolLM2": real,
    "Long prompts": contexts,
    "Ways of submission": submission,
    "Sorting": sorting,
    "Kernels": kernels,
    "Two streams on one server": streams,
    "Parts": failures,
}


def summary(report: Report) -> str:
    """Return what was found for each question, one page of plain words."""
    lines = ["Summary of mac.sh"]
    for heading, section in SECTIONS.items():
        try:
            sentences = section(report)
        except (KeyError, TypeError, IndexError) as problem:
            sentences = [f"This cannot be summarized: {type(problem).__name__} {problem}."]
        lines += ["", heading]
        for sentence in sentences or ["This was not measured."]:
            lines += textwrap.wrap(
                f"- {sentence}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def without_names(text: str) -> str:
    """Replace the path of this copy, and home directories and volumes at the beginning of paths."""
    text = text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
    return re.sub(r"/(Users|Volumes|home)/[^/\s\"']+", "~", text)


def main() -> None:
    file = Path(sys.argv[1])
    raw = without_names(file.read_text(encoding="utf-8", errors="replace"))
    parts = raw[raw.index("\n== ") :] if "\n== " in raw else ""
    file.write_text(summary(Report.of(parts)) + parts, encoding="utf-8")


if __name__ == "__main__":
    main()
