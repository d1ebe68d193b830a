"""schemathesis asks for everything that /openapi.json describes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="the extra clients is not installed")

HOOKS = Path(__file__).with_name("schemathesis_hooks.py")


@pytest.mark.timeout(960)
def test_answers_are_as_described(filling: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{filling}/openapi.json"]
    flags = [
        "--checks",
        "all",
        # The document has no rules between fields. It describes keys, and this server has none, so
        # that requests without the header are answered, although they violate the document.
        "--exclude-checks",
        "positive_data_acceptance,ignored_auth,missing_required_header,negative_data_rejection",
        "--request-timeout",
        "200",
        "--max-response-time",
        "200",
        "--seed",
        "1",
        # Bodies are made slowly on a machine that is busy.
        "--suppress-health-check",
        "too_slow",
    ]
    limits = ["--max-examples", os.environ.get("MLX_SPECDEC_EXAMPLES", "20")]
    own = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), "MLX_SPECDEC_ROOT": filling}
    ended = subprocess.run(
        [*command, *flags, *limits],
        env=own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
