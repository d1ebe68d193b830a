"""Write tests/slow.txt: the tests that only `./scripts/test.sh --all` runs, since they take long.

    ./scripts/test.sh --all --durations=0 -vv | tee durations.txt
    python benchmarks/list_slow_tests.py durations.txt

Setup, call and teardown of a test are added. Tests with the marker `slow` need no line."""

import re
import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).resolve().parents[1] / "tests" / "slow.txt"
SECONDS = 0.4
"""A test that takes longer is slow."""
LINE = re.compile(r"([0-9.]+)s (?:setup|call|teardown) +(\S.*)")


def main() -> None:
    """Read the report of pytest that the command line names, and write the list."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for duration, test in LINE.findall(Path(sys.argv[1]).read_text()):
        seconds[test.rstrip()] += float(duration)
    slow = sorted(test for test, duration in seconds.items() if duration > SECONDS)
    LIST.write_text("".join(f"{test}\n" for test in slow))
    print(f"{LIST}: {len(slow)} of {len(seconds)} tests")


if __name__ == "__main__":
    main()
