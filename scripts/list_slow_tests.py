"""Write tests/slow.txt: the tests that only `./scripts/test.sh --all` runs, since they take long.

    ./scripts/test.sh --all --durations=0 -vv | tee durations.txt
    python scripts/list_slow_tests.py durations.txt

Parts of a test are added up. What is marked as slow in its file need not be in the list.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).resolve().parents[1] / "tests" / "slow.txt"
SECONDS = 0.4
LINE = re.compile(r"([0-9.]+)s (?:setup|call|teardown) +(\S.*)")


def durations(report: str) -> dict[str, float]:
    """Seconds of each test that pytest's report names."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for taken, name in LINE.findall(report):
        seconds[name.rstrip()] += float(taken)
    return dict(seconds)


def main() -> None:
    """Run with the process's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="what pytest printed")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="what takes longer is slow")
    given = parser.parse_args()
    taken = durations(given.report.read_text())
    slow = sorted(name for name, seconds in taken.items() if seconds > given.seconds)
    LIST.write_text("".join(f"{name}\n" for name in slow))
    print(f"{LIST}: {len(slow)} of {len(taken)} tests")


if __name__ == "__main__":
    main()
