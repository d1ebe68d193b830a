#!/usr/bin/env bash
# mac.sh [FILE]: measure in about ten minutes what only a Mac can tell, and write it into one file
# (mac-report.txt). Without Metal it does the same with fewer texts and shapes. Each part has a time
# limit; a part that fails or is cut leaves a line, and the next one goes on.
set -u
cd "$(dirname "$0")/.." || exit 1
case ${1:-} in -h | --help) sed -n '2,4s/^# //p' "$0"; exit ;; esac
file=${1:-mac-report.txt}
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
"$python" -c 'import mlx.core, mlx_specdec' 2>/dev/null || {
  echo "error: mlx-specdec is not installed: run ./scripts/setup.sh" >&2
  exit 2
}
: >"$file" || exit 2

if "$python" -c 'import sys, mlx.core as mx; sys.exit(not mx.metal.is_available())'; then
  few=(--limit 12 --repeats 3 -m 96) lengths=1,2,3,5,8,auto small=() contexts="16 100 350"
else
  few=(--limit 1 --repeats 1 --warmup 0 -m 12) lengths=2 small=(--small) contexts="16"
fi

part() { # part SECONDS TITLE COMMAND...: run it into the file
  local limit=$1 title=$2 code=0
  shift 2
  echo "$title" >&2
  printf '\n== %s\n' "$title" >>"$file"
  # macOS has no timeout(1), but both have perl.
  perl -e 'alarm shift; exec @ARGV or exit 127' "$limit" "$@" >>"$file" 2>&1 </dev/null || code=$?
  [ $code -eq 0 ] || echo "(ended with code $code; 142 is the time limit of $limit s)" >>"$file"
}
specdec() { # specdec SECONDS TITLE ARGUMENTS...
  local limit=$1 title=$2
  shift 2
  part "$limit" "$title" "$python" -m mlx_specdec "$@"
}

part 20 machine sh -c 'date; uname -srm; sysctl -n machdep.cpu.brand_string hw.memsize 2>/dev/null; sw_vers 2>/dev/null; git rev-parse HEAD 2>/dev/null; true'
part 30 "memory limits" "$python" -c '
import importlib.metadata, json, mlx.core as mx
from mlx_specdec.checkpoints import disk
names = ("mlx", "mlx-lm", "mlx-specdec", "transformers")
print(json.dumps({
    "versions": {name: importlib.metadata.version(name) for name in names},
    "device": {key: str(value) for key, value in mx.device_info().items()},
    "usable": disk.usable_memory(), "memory": disk.memory(),
}))'
specdec 90 "translation: plain and draft" bench prompts/translation.jsonl --no-cache --json "${few[@]}" --num-draft $lengths
specdec 120 "Python: plain, draft and DSpark" bench prompts/python.jsonl --model weights/py-llama --no-cache --json \
  --draft-model weights/py-llama-draft --draft-model weights/py-llama-dspark "${few[@]}" --num-draft $lengths
specdec 60 "Python with whole weights" bench prompts/python.jsonl --model weights/py-llama --expand-weights --no-cache \
  --json --draft-model weights/py-llama-draft "${few[@]}" --num-draft $lengths
for count in $contexts; do
  # A prompt of so many tokens: the same line over and over.
  specdec 30 "Python behind $count lines" generate "$(yes 'x = 1' | head -n "$count")" --model weights/py-llama \
    --draft-model weights/py-llama-draft --no-cache --json -m 64
done
part 150 "kernels by rows, shapes and contexts" "$python" scripts/measure_kernels.py --seconds 120 ${small[@]+"${small[@]}"}
[ ${#small[@]} -gt 0 ] || specdec 60 "pairs that fit" pairs --json
echo "wrote $file: docs/platforms.md says what to do with it" >&2
