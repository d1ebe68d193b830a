"""What an estimate says of several machines that share the target."""

import json
from dataclasses import replace

import pytest

from mlx_specdec.errors import OptionError
from mlx_specdec.measure.estimate import ModelSource, estimate
from mlx_specdec.measure.passes import parts
from mlx_specdec.measure.prediction import ALPHAS, Link, cluster
from mlx_specdec.models.loading import outline

from ..support import tiny
from ..support.estimates import LLAMA, QUICK, T5, ticking

RDMA, WIFI = Link(2, 100e-6), Link(2, 5e-3)


def test_all_but_what_belongs_to_tokens_is_divided() -> None:
    llama = outline(LLAMA, "llama")
    table = 64 * 32 * 4
    assert llama.token_nbytes == [table, table]
    report = cluster(Link(4, 1e-4), llama, caches_bytes=4000)
    assert report.target_bytes == 2 * table + (llama.nbytes - 2 * table) / 4 + 1000
    layers = sum(llama.layer_nbytes)
    divided = layers / (layers + table)
    assert report.share == pytest.approx(divided / 4 + 1 - divided)
    tied = outline({**LLAMA, "tie_word_embeddings": True}, "llama")
    assert tied.token_nbytes == [table]
    assert cluster(Link(4, 1e-4), tied, 0).share == pytest.approx(report.share)


def test_a_pipeline_hands_on_from_machine_to_machine() -> None:
    link = Link(3, 1e-4, pipeline=True)
    pipeline = cluster(link, outline(LLAMA, "llama"), 0)
    assert (pipeline.exchanges, pipeline.share) == (3 + 1 + 1, 1.0)
    with pytest.raises(OptionError, match="cannot be a pipeline"):
        cluster(link, outline(T5, "t5"), 0)


def test_a_pair_is_estimated_for_one_machine_and_for_many() -> None:
    arguments = ModelSource("big", LLAMA), ModelSource("small", tiny.CONFIGS["llama"])
    report = estimate(*arguments, **QUICK, clock=ticking(), link=RDMA)
    assert report.speeds is not None and report.cluster is not None
    assert report.cluster.speeds is not None
    assert report.memory_bytes == report.cluster.target_bytes + report.draft.bytes
    assert report.cluster.target_bytes < report.target.bytes
    assert [one.alpha for one in report.cluster.speeds.predictions] == [*ALPHAS]
    assert any("computed from the times of this one" in note for note in report.notes)
    assert json.loads(json.dumps(report.as_dict()))["cluster"]["machines"] == 2
    assert "cluster" not in replace(report, cluster=None).as_dict()


def test_a_target_that_two_machines_hold_is_measured_on_a_few_layers_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ModelSource("big", LLAMA), ModelSource("small", tiny.CONFIGS["llama"])
    total = sum(
        argument.outline().nbytes + argument.outline().cache_nbytes(8, 8) for argument in arguments
    )
    monkeypatch.setattr("mlx_specdec.measure.estimate.usable_memory", lambda: total - 1)
    less = {**QUICK, "link": RDMA}
    report = estimate(*arguments, **less, clock=ticking())
    assert report.fits and report.speeds is None and report.cluster.speeds is None
    assert any("one machine has to hold" in note for note in report.notes)
    monkeypatch.setattr(
        "mlx_specdec.measure.passes.parts", lambda model: parts(model, most=100_000, least=1)
    )
    few = estimate(*arguments, **less, clock=ticking())
    assert few.speeds is not None and few.cluster.speeds is not None
