#!/usr/bin/env bash
# Set up if needed, then run the tests: the fast ones first, then the slow ones.
# Arguments go to both runs of pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh --dev
# The tests know every file that they read; nothing may come from the network.
export HF_HUB_OFFLINE=1
.venv/bin/python -m pytest -m "not slow" "$@"
.venv/bin/python -m pytest -m slow "$@"
