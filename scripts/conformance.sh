#!/usr/bin/env bash
# Runs the suites of others against a server on loopback, and prints a table.
#
#     ./scripts/conformance.sh [MODEL]
#
# MODEL: a checkpoint whose chat template knows tools. Without one it is a tiny random model, which
# fails what needs a model's prose. PYTHON: an interpreter with this package, the extra `clients`,
# llm-comply and trustedrouter-provider-check, .venv/bin/python by default. What is not installed
# there is skipped. The output of each suite is kept in the directory that the last line names.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
tools=$(dirname "$python")
out=$(mktemp -d)
port=8095
root=http://127.0.0.1:$port
model=${1:-$out/model}
if [ $# -eq 0 ]; then
  mkdir "$model"
  "$python" - "$model" <<'END'
import json, sys
from pathlib import Path
from mlx_specdec.text.tokenizer import load_tokenizer
from tests.support.tooled import CALLS, make_tooled
directory = make_tooled(Path(sys.argv[1]), marks=CALLS)
pieces = load_tokenizer(directory, kind="decoder-only").pieces
# Many tokens that no JSON needs end a text, so that random texts are short.
ending = [id for id, each in enumerate(pieces) if each and not each.isascii() and each not in "ĠĊ"]
file = directory / "config.json"
file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, *ending[:60]]}))
END
fi
"$python" -m mlx_specdec serve --model "$model" --port $port >"$out/serve.txt" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true' EXIT
for _ in $(seq 240); do curl -sf $root/health >/dev/null && break; sleep 0.5; done
name=$(curl -sf $root/v1/models | "$python" -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')

suite() { # NAME PROGRAM ARGUMENTS...
  local title=$1 program=$2 limit=600 code=0 result
  shift 2
  if [ ! -x "$program" ]; then printf '%-28s not installed\n' "$title"; return; fi
  # macOS has no timeout(1), but it has perl.
  perl -e 'alarm shift; exec @ARGV or exit 127' $limit "$program" "$@" >"$out/$title.txt" 2>&1 || code=$?
  result=$(grep -aE '[0-9]+(/[0-9]+)? pass' "$out/$title.txt" | tail -n 1 | sed 's/^[─= ]*//; s/[─= ]*$//') || true
  [ $code -eq 0 ] || result="$result (ended with code $code; 142 is the time limit of $limit s)"
  printf '%-28s %s\n' "$title" "$result"
}
comply() { suite "llm-comply-$1" "$tools/llm-comply" --format "$@" -u $root/v1 -k unused -m "$name"; }

comply open-responses
comply openai-chat
comply anthropic --auth-header x-api-key --no-bearer -H anthropic-version:2023-06-01
suite provider-check "$tools/trustedrouter-provider-check" --base-url $root/v1 --model "$name"
# openai, anthropic, LangChain's standard tests, schemathesis and others, each against a server of its own.
for each in openai anthropic langchain openapi others; do
  suite "clients-$each" "$python" -m pytest -W ignore -p no:cacheprovider "tests/clients/test_$each.py"
done
echo "$out"
