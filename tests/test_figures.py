"""Every figure of README.md, docs/performance.md, weights/README.md and pairs.json is in one file
of measurements, and README's table of Macs is what `--model auto` takes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.engine.known_pairs import TYPICAL_CHIP, USES, best_for, known_pairs, mac

from .support.shipped import ROOT

FILE = ROOT / "benchmarks" / "results" / "2026-11-29.json"
DATA = json.loads(FILE.read_text("utf-8"))["measurements"]
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|\.\d)")


@pytest.fixture(scope="module")
def script() -> Any:
    """The program that measures and writes the tables."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import measure_front

        return measure_front
    finally:
        sys.path.pop(0)


def numbers(text: str) -> set[float]:
    return {float(one.replace(",", "")) for one in NUMBER.findall(text)}


def in_file(value: Any) -> set[float]:
    """Return all numbers in a value of the file, also in its keys and strings."""
    if isinstance(value, dict):
        return set().union(*(in_file(key) | in_file(one) for key, one in value.items()), set())
    if isinstance(value, list):
        return set().union(*map(in_file, value), set())
    return {float(value)} if isinstance(value, int | float) else numbers(value)


def section(place: str) -> str:
    """Return the prose and tables of a section, which a path and an anchor name."""
    name, _, anchor = place.partition("#")
    for part in re.split(r"(?m)^(?=## )", (ROOT / name).read_text("utf-8")):
        title = part.partition("\n")[0].removeprefix("## ")
        if re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") == anchor:
            bare = re.sub(r"(?ms)^```.*?^```|`[^`]*`|\]\([^)]*\)|\*\*", " ", part)
            return re.sub(r"\d{4}-\d\d-\d\d", " ", bare)
    raise AssertionError(place)


PLACES = sorted({place for one in DATA.values() for place in one.get("pages", ())})


@pytest.mark.parametrize("place", PLACES)
def test_every_figure_of_a_page_is_in_the_file(place: str) -> None:
    cited = [one for one in DATA.values() if place in one.get("pages", ())]
    known = set().union(*map(in_file, cited))
    stated = numbers(section(place))
    assert stated <= known, (place, stated - known)
    assert len(stated) > 1 or "another-program" in place


@pytest.mark.parametrize("name", [name for name, one in DATA.items() if one.get("pages")])
def test_every_figure_of_the_file_is_on_a_page(name: str) -> None:
    one = DATA[name]
    values = {key: value for key, value in one.items() if key not in ("date", "pages", "setting")}
    values = {key: value for key, value in values.items() if not isinstance(value, str)}
    measured = set().union(*(in_file([*_leaves(value)]) for value in values.values()))
    stated = set().union(*(numbers(section(place)) for place in one["pages"]))
    assert measured <= stated, (name, measured - stated)


def _leaves(value: Any) -> list[Any]:
    """Return the numbers in a value, without keys and settings in words."""
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if isinstance(value, str) else [value]


def test_every_section_of_figures_cites_the_file() -> None:
    titles = re.findall(r"(?m)^## (.+)$", (ROOT / "docs" / "performance.md").read_text("utf-8"))
    anchors = {place.partition("#")[2] for place in PLACES if "performance" in place}
    assert {title.lower().replace(" ", "-") for title in titles} == anchors
    for name in ("README.md", "docs/performance.md", "weights/README.md"):
        assert f"benchmarks/results/{FILE.name}" in (ROOT / name).read_text("utf-8")


def test_the_tables_are_those_that_the_script_writes(script: Any) -> None:
    figures = DATA["shipped pairs"]
    assert script.readme_table(figures) in (ROOT / "README.md").read_text("utf-8")
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert script.performance_table(figures) in page


def test_the_script_replaces_a_table_and_the_setting(script: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n## B\n\nOn old.\n\n| x |\n|---|\n| 1 |\n\n## C\n\n| y |\n", "utf-8")
    script.replace_in(page, "B", {"old": "new"}, "| z |\n|---|\n| 2 |")
    assert page.read_text("utf-8") == (
        "# A\n\n## B\n\nOn new.\n\n| z |\n|---|\n| 2 |\n\n## C\n\n| y |\n"
    )


def test_examples_show_the_speeds_of_the_file(script: Any) -> None:
    for page, speed in DATA["examples"]["tokens_per_second"].items():
        text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
        assert float(script.SPEED.search(text)[1]) == speed, page


def test_the_table_of_pairs_has_the_gains_of_the_file() -> None:
    names = {"weights/t5-enfr": "translation", "weights/py-llama": "Python"}
    found = [one for one in known_pairs() if one.run and one.gains]
    assert len(found) == 2
    for one in found:
        gain = DATA["shipped pairs"][names[one.target.name]]["auto"]["speedup"]
        assert one.gain(16, USES[0]) == gain
        assert one.source is not None and one.source["where"] == f"benchmarks/results/{FILE.name}"


def test_readme_shows_what_auto_takes() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| (M\d[^|]*?) \| (.*?) \| (\d+) \| (\d+) \| (.*?) \| no \|$", text)
    assert len(rows) >= 6
    for chip, named, before, after, source in rows:
        machine = mac(chip.replace(",", ""))
        one, bits = best_for(USES[0], machine)
        target = one.target.name.partition("/")[2].removesuffix("-Instruct")
        assert named == f"{target} at {bits} bits, {one.kind}", chip
        speeds = [round(machine.speed * one.speed(bits, use)) for use in ("plain", USES[0])]
        assert [int(before), int(after)] == speeds, chip
        assert one.source is not None and not one.run
        measured = chip.partition(",")[0] == one.source["chip"]
        assert source.startswith("computed") != measured
        assert measured or source == f"computed from an {TYPICAL_CHIP}"
