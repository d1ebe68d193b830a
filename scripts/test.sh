#!/usr/bin/env bash
# Set up if needed, then run tests with pytest.
#   ./scripts/test.sh            the fast ones, on all cores
#   ./scripts/test.sh --all      the slow ones as well, on all cores
#   ./scripts/test.sh --as-gpu   all, but the package takes no branch for CPUs, as on a Mac's GPU
#   ./scripts/test.sh --real     those of published models: SmolLM2 is downloaded first (98 MB), the
#                                others are tested if real_models.sh has downloaded them
#   ./scripts/test.sh PATH ...   what is named, slow or not; any arguments of pytest will do
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh --dev
# The tests know every file that they read; nothing may come from the network.
export HF_HUB_OFFLINE=1
# Tests start the program some hundred times: it is compiled once.
unset PYTHONDONTWRITEBYTECODE
# A core each: the threads of one worker's BLAS would only wait for those of the others.
export MKL_NUM_THREADS=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Neighbours in a file share what they load, so a worker is given them together.
parallel=(-n auto --maxprocesses 8 --dist worksteal)
case "${1-}" in
  "") set -- "${parallel[@]}" -m "not slow" ;;
  --all) set -- "${parallel[@]}" "${@:2}" ;;
  --as-gpu)
    export MLX_SPECDEC_TEST_AS_GPU=1
    set -- "${parallel[@]}" "${@:2}"
    ;;
  --real)
    ./scripts/real_models.sh smollm2 >&2
    export MLX_SPECDEC_BLAS=auto # tests/conftest.py says why
    set -- tests/real "${@:2}"
    ;;
esac
exec .venv/bin/python -m pytest "$@"
