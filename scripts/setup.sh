#!/usr/bin/env bash
# Create .venv and install the package into it; does nothing when that is done already.
# --dev adds what the tests need, --fast-cpu a faster BLAS for Linux x86 (220 MB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=""
for argument in "$@"; do
  case "$argument" in
    --dev) extras="$extras dev" ;;
    --fast-cpu) extras="$extras fast-cpu" ;;
    -h | --help)
      sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *)
      echo "error: setup.sh does not know $argument (only --dev and --fast-cpu)" >&2
      exit 2
      ;;
  esac
done

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: no Python 3.10 or newer found: install one, or name it in PYTHON" >&2
  exit 2
}

# What was installed stays valid while these files and the place are the same. cksum is POSIX.
wanted="$(cat pyproject.toml constraints.txt | cksum) $PWD"
stamp=.venv/.mlx-specdec-installed

is_installed() {
  [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$wanted" ] || return 1
  local extra
  for extra in $extras; do
    sed -n 2p "$stamp" | grep -qw -- "$extra" || return 1
  done
}

if is_installed; then
  exit 0
fi

# Extras that were asked for earlier stay.
if [ -f "$stamp" ]; then
  extras="$extras $(sed -n 2p "$stamp")"
  rm -f "$stamp"
fi
# A virtual environment cannot be moved: one from another place is made anew.
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python="$(find_python)"
  echo "creating .venv with $python" >&2
  if ! "$python" -m venv --clear .venv >&2; then
    echo "error: $python cannot create a virtual environment: install its venv module" >&2
    exit 2
  fi
fi
list="$(echo "$extras" | tr ' ' '\n' | sort -u | sed '/^$/d' | tr '\n' ',')"
echo "installing mlx-specdec${list:+ with ${list%,}} (a few minutes the first time)" >&2
if ! .venv/bin/python -m pip install --disable-pip-version-check --quiet \
  --constraint constraints.txt --editable ".${list:+[${list%,}]}" >&2; then
  echo "error: the installation failed: see above, then run this again" >&2
  exit 2
fi
printf '%s\n%s\n' "$wanted" "$(echo "$list" | tr ',' ' ')" >"$stamp"
