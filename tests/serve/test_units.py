"""The units of launchd and systemd on the page about the server are read as they should be."""

import plistlib
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from mlx_specdec.serve.server import CUT_SECONDS, FINISH_SECONDS, WRITE_SECONDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"
LONGEST = FINISH_SECONDS + 2 * CUT_SECONDS + WRITE_SECONDS
"""Seconds that the end of a server may take."""


def block(kind: str) -> str:
    [text] = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return text


def command() -> list[str]:
    return [*plistlib.loads(block("xml").encode())["ProgramArguments"]]


def test_launchd_restarts_a_server_that_failed_and_lets_it_end() -> None:
    unit = plistlib.loads(block("xml").encode())
    assert unit["RunAtLoad"] and unit["KeepAlive"] == {"SuccessfulExit": False}
    assert unit["ExitTimeOut"] >= LONGEST
    program, *arguments = unit["ProgramArguments"]
    assert Path(program).name == "mlx-specdec" and arguments[0] == "serve"


def test_systemd_restarts_a_server_that_failed_and_lets_it_end() -> None:
    unit = ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block("ini"))
    service = unit["Service"]
    assert service["Restart"] == "on-failure" and int(service["TimeoutStopSec"]) >= LONGEST
    program, *arguments = service["ExecStart"].split()
    names = [re.sub(r"/\w+/me/", "", part) for part in (program, *arguments)]
    assert names == [re.sub(r"/\w+/me/", "", part) for part in command()]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_accepts_its_unit(tmp_path: Path) -> None:
    # systemd-analyze wants a program that exists.
    text = re.sub(r"(?<=ExecStart=)\S+", sys.executable, block("ini"))
    file = tmp_path / "mlx-specdec.service"
    file.write_text(text)
    line = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert "mlx-specdec.service" not in done.stderr, done.stderr
