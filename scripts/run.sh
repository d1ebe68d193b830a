#!/usr/bin/env bash
# Set up if needed, then run main.py with the given arguments; relative paths stay the caller's.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/main.py" "$@"
