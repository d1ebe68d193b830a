#!/usr/bin/env bash
# mac.sh [--wired] [FILE]: measure within ten minutes what only a Mac can tell, and write it into one
# file (mac-report.txt), which begins with a summary in words. Without Metal it measures the same at
# tiny sizes. Each part has a time limit; if a part fails or is cut, the next one runs all the same.
# --wired: at the end, serve for two more minutes with MLX's highest wired limit. This has
# restarted Macs: save your work first.
set -u
cd "$(dirname "$0")/.." || exit 1
wired=
case ${1:-} in
  -h | --help) sed -n '2,6s/^# //p' "$0"; exit ;;
  --wired) wired=1; shift ;;
  -*) echo "error: mac.sh has no option $1: its options are --wired and --help" >&2; exit 2 ;;
esac
file=${1:-mac-report.txt}
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)

# macOS has no timeout(1), but both have perl. The command leads a process group, so that what it
# has started ends with it. SIGINT comes three seconds before the limit: bench then prints what it
# has measured so far.
runner='
  my ($limit, $code) = (shift, 0);
  my $child = fork // exit 127;
  unless ($child) { setpgrp; exec @ARGV or exit 127 }
  sub stop { kill $code ? "KILL" : "INT" => -$child; $code ||= shift; alarm 3 }
  $SIG{ALRM} = sub { stop(142) };
  $SIG{INT} = $SIG{TERM} = sub { stop(130) };
  alarm $limit - 3;
  waitpid $child, 0;
  my $end = $?;
  kill KILL => -$child;
  exit($code || ($end & 127 ? 128 + ($end & 127) : $end >> 8));'
slack=1
limited() { # limited SECONDS COMMAND...
  local limit=$(($1 * slack))
  shift
  perl -e "$runner" "$limit" "$@" </dev/null
}
part() { # part SECONDS TITLE COMMAND...: run it into the file
  local limit=$1 title=$2 code=0
  shift 2
  echo "$title" >&2
  printf '\n== %s\n' "$title" >>"$file"
  limited "$limit" "$@" >>"$file" 2>&1 || code=$?
  [ $code -eq 0 ] || ended $code
}
ended() { echo "(ended with code $1; 142 is the time limit)" >>"$file"; }
specdec() { # specdec SECONDS TITLE ARGUMENTS...
  local limit=$1 title=$2
  shift 2
  part "$limit" "$title" "$python" -m mlx_specdec "$@"
}
check() { # check SECONDS TITLE ARGUMENTS...
  local limit=$1 title=$2
  shift 2
  part "$limit" "$title" "$python" scripts/mac_checks.py "$@" ${small[@]+"${small[@]}"}
}
summarize() { limited 8 "$python" scripts/mac_summary.py "$file"; }

found=$(limited 30 "$python" -c '
import mlx.core as mx, mlx_specdec
print("metal" if mx.metal.is_available() else "no metal")' 2>/dev/null) || {
  echo "error: mlx-specdec is not installed: run ./scripts/setup.sh" >&2
  exit 2
}
: >"$file" || exit 2
trap 'ended 130; summarize; exit 130' INT TERM
if command -v caffeinate >/dev/null; then
  caffeinate -i -w $$ >/dev/null 2>&1 & # the Mac stays awake until this script ends
fi

# SmolLM2 (98 MB) comes over the network meanwhile. Its comparison is left out if it comes too late.
fetched=$(mktemp)
./scripts/real_models.sh smollm2 >"$fetched" 2>/dev/null </dev/null &

if [ "$found" = metal ]; then
  few=(--limit 6 --repeats 2 -m 96) tokens=64 lengths=1,2,3,5,8,auto small=() contexts="16 100 350" seconds=120
else
  few=(--limit 1 --repeats 1 -m 4) tokens=4 lengths=2 small=(--small) contexts="16" seconds=0.1
  slack=5 # only tests run this, on machines that may be busy
fi

part 5 machine sh -c 'date; uname -srm; sw_vers 2>/dev/null
sysctl machdep.cpu.brand_string hw.memsize iogpu 2>/dev/null
pmset -g 2>/dev/null | grep -i lowpowermode; git rev-parse HEAD 2>/dev/null; true'
part 10 "memory limits" "$python" -c '
import importlib.metadata, json, mlx.core as mx
from mlx_specdec import system
names = ("mlx", "mlx-lm", "mlx-specdec", "transformers")
print(json.dumps({
    "versions": {name: importlib.metadata.version(name) for name in names},
    "device": {key: str(value) for key, value in mx.device_info().items()},
    "usable": system.usable_memory(), "memory": system.memory(),
}))'
check 55 "bits of rows" rows
check 12 "float32 products" float32
specdec 35 "translation: plain and draft" bench prompts/translation.jsonl --no-cost-cache --json "${few[@]}" --num-draft $lengths
specdec 50 "Python: plain, draft and DSpark" bench prompts/python.jsonl --model weights/py-llama --no-cost-cache --json \
  --draft-model weights/py-llama-draft --draft-model weights/py-llama-dspark "${few[@]}" --num-draft $lengths
specdec 20 "Python with whole weights" bench prompts/python.jsonl --model weights/py-llama --expand-weights --no-cost-cache \
  --json --draft-model weights/py-llama-draft "${few[@]}" --num-draft $lengths
if limited 8 "$python" -m mlx_specdec bench --help 2>/dev/null | grep -q -e '--exact'; then
  specdec 20 "Python with --exact" bench prompts/python.jsonl --model weights/py-llama --exact --no-cost-cache \
    --json --draft-model weights/py-llama-draft "${few[@]}" --num-draft 3
fi
for count in $contexts; do
  # A prompt of so many tokens: the same line over and over.
  specdec 8 "Python after $count lines" generate "$(yes 'x = 1' | head -n "$count")" --model weights/py-llama \
    --draft-model weights/py-llama-draft --no-cost-cache --json -m $tokens
done
check 60 "ways of submission" submission
check 10 "sorting" sorting
part 32 "kernels by rows, shapes and contexts" "$python" scripts/measure_kernels.py --seconds $((25 * slack)) ${small[@]+"${small[@]}"}
[ ${#small[@]} -gt 0 ] || specdec 12 "pairs that fit" pairs --json
model=$(sed -n "s/.* --model '\(.*\)'$/\1/p" "$fetched")
rm -f "$fetched"
[ -z "$model" ] || part 60 "SmolLM2 and its references" "$python" scripts/mac_real.py "$model" ${small[@]+"${small[@]}"}
check 145 "two streams" streams --seconds $seconds
summarize
if [ -n "$wired" ]; then
  sync # what was measured outlives a restart
  check 145 "two streams with the wired limit" streams --seconds $seconds --wired
  summarize
fi
echo "wrote $file: docs/platforms.md says what to do with it" >&2
