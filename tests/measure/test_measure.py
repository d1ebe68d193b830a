"""The methods of a benchmark meet every prompt in turns."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.compare import one_by_one
from mlx_specdec.measure.methods import Method, Sample, measure
from mlx_specdec.text.prompts import Prompt


def test_methods_take_turns_and_each_comes_first_equally_often() -> None:
    runs: list[tuple[str, str]] = []

    def method(name: str) -> Method:
        def run(prompt: Sequence[int]) -> Sample:
            runs.append((name, bytes(prompt).decode()))
            return Sample((1, 2), 2, 0.5, 2, text=f"<{name}>")

        return Method(name, name, 0, True, one_by_one(run))

    prompts = [Prompt((text,)) for text in ("a", "b", "c")]
    methods = [method(name) for name in ("plain", "x", "y")]
    found = measure(prompts, methods, lambda text: list(text.encode()), repeats=2)
    warm, counted = runs[:3], runs[3:]
    assert warm == [("plain", "a"), ("x", "a"), ("y", "a")]
    groups = [counted[start : start + 3] for start in range(0, len(counted), 3)]
    assert [{text for _, text in group} for group in groups] == [{"a"}, {"b"}, {"c"}] * 2
    assert Counter(group[0][0] for group in groups) == {"plain": 2, "x": 2, "y": 2}
    assert all(len({name for name, _ in group}) == 3 for group in groups)
    keys = {(case, repeat) for case in range(3) for repeat in range(2)}
    assert all(set(found.samples[name]) == keys for name in ("plain", "x", "y"))
    assert not found.interrupted
