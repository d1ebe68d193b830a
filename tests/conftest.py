"""Settings and fixtures of all tests."""

import contextlib
import gc
import itertools
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())
"""Tests that took long where they were last measured; benchmarks/list_slow_tests.py writes them."""
collect_ignore = ["real"]
"""Tests that need a download: ./scripts/test.sh --real names their directory."""
NUMBERS = itertools.count()
# Tests compare float32 logits more closely than TF32 keeps them, whatever the shell says.
os.environ["MLX_ENABLE_TF32"] = "0"
SITE = Path(__file__).parent / "support" / "site"
OTHER_DEVICES = ("MLX_SPECDEC_TEST_DEVICE", "MLX_SPECDEC_TEST_AS_GPU")
"""Variables that sitecustomize.py in SITE explains."""
if any(map(os.environ.get, OTHER_DEVICES)) and str(SITE) not in os.environ.get("PYTHONPATH", ""):
    # Workers of pytest-xdist and all other processes run the file as they start.
    places = (str(SITE), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    runpy.run_path(str(SITE / "sitecustomize.py"))
# MLX comes before the package, so that MLX's own BLAS multiplies. The sums of MKL depend on the
# alignment of arrays, and tests compare logits more closely. Programs that tests start use MKL, and
# so do tests of published models, with which MLX's own BLAS takes ten times as long.
if os.environ.get("MLX_SPECDEC_BLAS") != "auto":
    import_module("mlx.core")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # In the background of a shell without job control. Processes that are started inherit it, and
    # tests interrupt theirs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(os, "SCHED_BATCH"):
    # What MLX's thread is handed does not interrupt the one that hands it over, ten times a token.
    with contextlib.suppress(OSError):  # some sandboxes forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow by a measured list, since often a few parameters of a test take long, and
    skip tests of the CPU's branches elsewhere."""
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
    of_cpus = [item for item in items if item.get_closest_marker("cpu_only")]
    # Not imported before the tests have chosen a BLAS.
    if of_cpus and not import_module("mlx_specdec.models.number_format").on_cpu():
        for item in of_cpus:
            item.add_marker(pytest.mark.skip(reason="tests what runs on MLX's CPU back end alone"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let tests that draw without a key draw the same numbers in every run and order. The first
    numbers of a process depend on its time."""
    if (mlx := sys.modules.get("mlx.core")) is not None:
        mlx.random.seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt what is loaded by now from garbage collection, which some tests run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def what_tests_share_is_made_without_the_users_costs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """It is made before each test has a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPECDEC_CACHE", str(tmp_path_factory.mktemp("costs-of-rounds")))
        yield


@pytest.fixture(autouse=True)
def surroundings_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No test reads or writes the costs that the user's own decoding measured."""
    # Most tests keep nothing, and need no directory for it.
    costs = tmp_path_factory.getbasetemp() / f"costs-of-rounds-{next(NUMBERS)}"
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(costs))
