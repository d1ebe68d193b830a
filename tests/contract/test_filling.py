"""Filling in the middle: the prompts of each family, both endpoints, and drafts from the suffix."""

from collections.abc import Callable

import pytest

from .zoo import COMPLETIONS, MIDDLE, Model

Models = Callable[[str], Model]
BEFORE, AFTER = "def read_lines(file):\n    ", "\n    return lines"
FILL = "/infill"


def test_both_endpoints_write_the_middle_and_the_same_plainly(models: Models) -> None:
    model, body = models("filling"), {"temperature": 0, "max_tokens": 12}
    whole = model.ok(COMPLETIONS, prompt=BEFORE, suffix=AFTER, **body)
    text = whole["choices"][0]["text"]
    assert model.written(prompt=BEFORE, suffix=AFTER, speculative=False, **body) == text
    assert model.written(prompt=BEFORE, **body) != text
    asked = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 12, "temperature": 0}
    filled = model.ok(FILL, **asked)
    assert filled["content"] == text and filled["stop"] and "timings" in filled
    assert filled["tokens_evaluated"] == whole["usage"]["prompt_tokens"]
    events = model.ask(FILL, **asked, stream=True).events
    assert "".join(event["content"] for event in events) == text and events[-1]["stop"]
    chosen = model.ok(FILL, **asked, response_fields=["content", "timings/prompt_n"])
    assert list(chosen) == ["content", "timings/prompt_n"]
    assert model.ok(FILL, **{**asked, "n_predict": 0})["content"] == ""
    extra = [{"filename": "a.py", "text": "lines = []"}]
    longer = model.ok(FILL, **{**asked, "n_predict": 0}, input_extra=extra)
    # A mark stands before the file.
    count = len(model.ids("a.py\nlines = []\n")[1:]) + 1
    assert longer["tokens_evaluated"] == filled["tokens_evaluated"] + count
    # A prompt that does not fit is cut around the gap.
    halves = {"input_prefix": " x" * 400, "input_suffix": " y" * 400}
    assert model.ok(FILL, **halves, n_predict=5)["tokens_predicted"] <= 5


@pytest.mark.parametrize("path", [COMPLETIONS, FILL])
@pytest.mark.parametrize("family", ["middle", "suffix-first"])
def test_a_middle_that_repeats_the_suffix_is_drafted_from_it(
    models: Models, family: str, path: str
) -> None:
    """No two tokens of the middle are alike, and no earlier request has written it."""
    model, completes = models(f"{family}{path.replace('/', '-')}"), path == COMPLETIONS
    before, after = ("prompt", "suffix") if completes else ("input_prefix", "input_suffix")
    suffix = f"\n{MIDDLE}\nreturn total"
    answer = model.ok(path, **{before: "x = 1\n", after: suffix, "max_tokens": 60})
    assert (answer["choices"][0]["text"] if completes else answer["content"]) == MIDDLE
    timings = answer["timings"]
    assert timings["draft_n_accepted"] > timings["predicted_n"] / 2
