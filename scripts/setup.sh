#!/usr/bin/env bash
# Create .venv and install the package with its server; does nothing when that is done already.
# On Linux x86 a fast BLAS comes along (220 MB, without which speculation gains nothing there):
# --small leaves it out from then on, and --fast-cpu adds it after all.
# --dev adds what the tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What was installed stays valid while these files and the place are the same. cksum is POSIX.
wanted="$(cat pyproject.toml constraints.txt | cksum) $PWD"
stamp=.venv/.mlx-specdec-installed
# What was asked for earlier stays: the names of extras, and "small".
kept="$(sed -n 2p "$stamp" 2>/dev/null || true)"

# Small, and have wheels wherever MLX has them.
extras="grammar server"
for argument in "$@"; do
  case "$argument" in
    --dev) extras="$extras dev" ;;
    --fast-cpu) extras="$extras fast-cpu" ;;
    --small) extras="$extras small" ;;
    -h | --help)
      sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *)
      echo "error: setup.sh does not know $argument (only --dev, --small and --fast-cpu)" >&2
      exit 2
      ;;
  esac
done

has() {
  echo "$1" | grep -qw -- "$2"
}

if has "$extras" small && has "$extras" fast-cpu; then
  echo "error: --small and --fast-cpu contradict each other: give one of them" >&2
  exit 2
fi
# The fast BLAS is the default where MLX's own is slow.
if ! has "$extras $kept" small && [ "$(uname -sm)" = "Linux x86_64" ]; then
  extras="$extras fast-cpu"
fi

# On a Mac, MLX has wheels for arm64 alone, and some Pythons there are built for Intel.
suits='import platform, sys
old, mac = sys.version_info < (3, 11), sys.platform == "darwin"
sys.exit(old or (mac and platform.machine() != "arm64"))'

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c "$suits" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  case "$(uname -sm)" in
    Darwin*) echo "error: no Python 3.11 or newer for arm64 found: brew install python@3.12" >&2 ;;
    *) echo "error: no Python 3.11 or newer found: install one, or name it in PYTHON" >&2 ;;
  esac
  exit 2
}

is_installed() {
  [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$wanted" ] || return 1
  local extra
  for extra in $extras; do
    has "$kept" "$extra" || return 1
  done
}

if is_installed; then
  exit 0
fi

rm -f "$stamp"
# The newer of two wishes that contradict each other counts.
if has "$extras" fast-cpu; then kept="${kept//small/}"; fi
if has "$extras" small && has "$kept" fast-cpu; then
  kept="${kept//fast-cpu/}"
  .venv/bin/python -m pip uninstall --quiet --yes mkl >&2 || true
fi
words="$(echo "$extras $kept" | tr ' ' '\n' | sort -u | sed '/^$/d')"
# A virtual environment cannot be moved: one from another place is made anew.
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python="$(find_python)"
  echo "creating .venv with $python" >&2
  if ! "$python" -m venv --clear .venv >&2; then
    echo "error: $python cannot create a virtual environment: install its venv module" >&2
    exit 2
  fi
fi
list="$(echo "$words" | sed '/^small$/d' | tr '\n' ',' | sed 's/^,*//; s/,*$//')"
echo "installing mlx-specdec${list:+ with $list} (a few minutes the first time)" >&2
if ! .venv/bin/python -m pip install --disable-pip-version-check --quiet \
  --constraint constraints.txt --editable ".${list:+[$list]}" >&2; then
  echo "error: the installation failed: see above, then run this again" >&2
  exit 2
fi
printf '%s\n%s\n' "$wanted" "$(echo "$words" | tr '\n' ' ')" >"$stamp"
