"""schemathesis asks for everything that /openapi.json describes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("schemathesis", reason="the extra clients is not installed")

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


def test_answers_are_as_described(root: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{root}/openapi.json"]
    flags = ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"]
    limits = ["--max-examples", os.environ.get("MLX_SPECDEC_EXAMPLES", "20"), "--seed", "1"]
    ended = subprocess.run([*command, *flags, *limits], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
