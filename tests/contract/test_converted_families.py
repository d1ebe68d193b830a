"""Every encoder-decoder model writes after its conversion what it wrote before."""

import shutil
from pathlib import Path

import pytest

from mlx_specdec import Options, Request, convert, generate_many, load

from .converted import config_of
from .scores import letters
from .support import ROOT, quick

FIXTURES = ROOT / "tests" / "fixtures"
MODELS = sorted(
    file.parent
    for family in ("t5", "bart", "t5gemma2", "madlad")
    for file in (FIXTURES / family).rglob("config.json")
)


QUICK = [FIXTURES / name for name in ("t5/mt5", "bart/marian-two-vocabularies", "t5gemma2/old")]


@pytest.mark.parametrize(
    "model", quick(MODELS, *QUICK), ids=lambda model: str(model.relative_to(FIXTURES))
)
def test_a_converted_model_writes_the_same(model: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model, tmp_path / "source"))
    size = config_of(source).get("vocab_size") or config_of(source)["decoder"]["vocab_size"]
    letters(source, size)
    convert(str(source), tmp_path / "out")
    options = Options(max_tokens=12, temperature=1.0, seed=3, regular=True)
    request = Request([5, 9, 13, 7, 31, 2, 1], options, top_logprobs=0, ignore_eos=True)
    written = []
    for directory in (source, tmp_path / "out"):
        [result] = generate_many(load(directory, dtype="float32"), [request], batch_size=1)
        written.append(result.tokens)
    assert len(written[0]) == 12 and written[0] == written[1]
