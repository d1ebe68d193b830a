"""The report: whole, self-contained, and showing the figures it was given."""

import json
import platform
import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlx_specdec.errors import OutputError
from mlx_specdec.measure import report
from mlx_specdec.measure.analysis import Analysis, analyse
from mlx_specdec.measure.figures import Figures, SpeedUp
from mlx_specdec.measure.passes import PassCosts
from mlx_specdec.measure.presentation import Value
from mlx_specdec.measure.report import Setting, page, write_report

from ..support.bench_samples import Checker, measured, method, sample, setting


@pytest.mark.parametrize(
    ("sysctl", "expected"),
    [("echo Apple M3 Max", "Apple M3 Max"), ("exit 1", "arm"), (None, "arm")],
)
def test_a_macs_processor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sysctl: str | None, expected: str
) -> None:
    monkeypatch.setattr(report, "CPU_NAMES", tmp_path / "absent")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    monkeypatch.setenv("PATH", str(tmp_path))
    if sysctl is not None:
        (tmp_path / "sysctl").write_text(f"#!/bin/sh\n{sysctl}\n")
        (tmp_path / "sysctl").chmod(0o755)
    assert report.processor() == expected


def analysis(categories: tuple[str | None, ...] = ("one", "two")) -> Analysis:
    rounds = [(3, 3), (3, 2), (3, 2)]
    short = [(1, 1), (1, 0)] * 3
    found = measured(
        {
            "plain": [sample(1.0), sample(2.0)],
            "draft 1": [sample(0.8, short)] * 2,
            "draft 3": [sample(0.5, rounds), sample(0.5, rounds, tokens=(1, 2, 9))],
            "draft auto": [sample(0.6, rounds)] * 2,
            "mlx-lm 3": [sample(0.7)] * 2,
        },
        [
            method("plain", "plain", 0),
            method("draft 1", "draft", 1),
            method("draft 3", "draft", 3),
            method("draft auto", "draft", "auto"),
            method("mlx-lm 3", "mlx-lm", 3),
        ],
        categories,
        parts={"draft 3": [sample(0.6, rounds, draft=0.06, verify=0.11)]},
    )
    found_all = analyse(found, PassCosts(0.015, {1: 0.15, 2: 0.2, 4: 0.3}))
    assert found_all is not None
    return found_all


def test_the_page_is_well_formed_and_refers_to_nothing_outside() -> None:
    text = page(analysis(), setting())
    checker = Checker()
    checker.feed(text)
    assert (checker.open, checker.wrong, checker.references) == ([], [], [])
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    drawings = re.findall(r"<svg.*?</svg>|<table class=.*?</table>", text, re.DOTALL)
    assert len(drawings) == 5
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_every_color_that_is_used_has_a_value_in_light_and_dark() -> None:
    text = page(analysis(), setting())
    for name in set(re.findall(r"var\((--[\w-]+)", text)) - {"--c"}:
        assert text.count(f"{name}: #") == 2, name


def test_the_page_shows_the_figures_and_holds_them_as_json() -> None:
    text = page(analysis(), setting())
    # 10 and 3 tokens in 0.5 s each, against 20 in 3 s.
    assert "<td>draft 3</td><td>13.0</td><td>1.95</td>" in text
    found = re.search(r'<script type="application/json" id="figures">(.*)</script>', text)
    assert found is not None
    figures = json.loads(found.group(1))
    assert figures["setting"]["model"] == "models/big"
    assert figures["methods"][2]["speed_up"]["overall"]["value"] == pytest.approx(1.95)
    assert "Sequences that are not the same" in text and "draft 3, prompt 2, token 0" in text


def titles_of(figures: Analysis) -> list[str]:
    return [chart.title for chart in figures.presentation().charts]


def test_five_charts_are_drawn_and_those_without_figures_left_out() -> None:
    titles = titles_of(analysis())
    assert len(titles) == 5
    assert titles_of(analysis((None, None))) == titles[:4]
    alone = analyse(measured({"plain": [sample(1.0)]}, [method("plain", "plain", 0)], [None]), None)
    assert alone is not None and titles_of(alone) == []
    assert "All methods" in page(alone, setting(draft_model=None))


def test_the_speedup_chart_has_measured_intervals_and_the_prediction_beside_them() -> None:
    figures = analysis()
    drawing = page(figures, setting()).split("<svg")[1]
    assert drawing.count('class="line dashed"') == 1
    assert drawing.count('class="line"') == 2  # draft and mlx-lm
    assert f"draft, predicted, 3: {figures.predictions['draft'][2]:.2f}" in drawing
    # Two sequences have no interval, and nothing is drawn of it.
    assert "<title>draft, 3: 1.95</title>" in drawing and 'class="whisker"' not in drawing


def verdict_of(figures: Analysis) -> str:
    return figures.presentation().verdict


def test_the_verdict_is_a_sentence() -> None:
    figures = analysis()
    assert verdict_of(figures) == "draft auto is fastest: 2.50 times plain decoding."
    assert verdict_of(figures) in page(figures, setting())

    def at(name: str, ratio: float) -> Figures:
        figure = next(one for one in figures.methods if one.name == name)
        return replace(figure, speed_up=SpeedUp(Value(ratio), Value(ratio)))

    several = (figures.methods[0], at("draft 1", 0.9), at("draft auto", 1.2), at("draft 3", 1.6))
    assert verdict_of(replace(figures, methods=several)) == (
        "draft 3 is fastest: 1.60 times plain decoding; draft auto reaches 0.75 of it."
    )
    assert "Nothing is faster" in verdict_of(replace(figures, methods=several[:2]))
    assert verdict_of(replace(figures, methods=several[:1])) == ""


def picture(text: str) -> ElementTree.Element:
    encoded = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    assert encoded is not None
    return ElementTree.fromstring(b64decode(encoded[1]))


def headline(figures: Analysis, chosen: Setting) -> str:
    return report.headline(figures.presentation(), chosen)


def test_the_page_begins_with_a_sentence_and_a_picture_that_stands_alone() -> None:
    text = page(analysis(), setting(device="cpu", machine="Box <1>"))
    sentence = headline(analysis(), setting(device="cpu", machine="Box <1>"))
    assert sentence == (
        "Drafts made big 2.50 times as fast on Box <1>; 3 of 6 texts are plain decoding's own."
    )
    assert text.index("<h1>Drafts made big") < text.index("<figure>") < text.index("<h2>")
    drawn = picture(text)
    texts = [
        " ".join(element.itertext()) for element in drawn.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert " ".join(texts[:2]) == sentence and "2.50 ×" in texts and "plain" in texts
    bars = {one.get("class"): one for one in drawn.iter("{http://www.w3.org/2000/svg}rect")}
    assert float(bars["bar best"].get("width", 0)) == 630
    slow = [replace(one, speed_up=None) for one in analysis().methods]
    assert "Plain decoding was measured" in headline(replace(analysis(), methods=slow), setting())
    lossy = setting(lossy=True)
    assert headline(analysis(), lossy) == f"Drafts made big 2.50 times as fast on {lossy.machine}."


def test_names_from_outside_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>\"'&"
    text = page(analysis((evil, "two")), setting(model=evil, machine=evil, prompts=evil))
    assert "<script>alert" not in text
    checker = Checker()
    checker.feed(text)
    assert (checker.open, checker.wrong) == ([], [])


def test_the_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_report(analysis(), setting(), file)
    assert file.read_text(encoding="utf-8").endswith("</html>\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(OutputError, match="cannot write the report"):
        write_report(analysis(), setting(), tmp_path / "nowhere" / "report.html")
