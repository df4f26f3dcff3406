#!/usr/bin/env bash
# Every test, on two cores: tests/run.sh PYTHON
set -uo pipefail
python=$1
told=$(mktemp)
# SGLang takes the process that it is imported into: what tests it has one of its own, and runs
# beside what needs no more than one core.
"$python" -m pytest tests/engine tests/sglang tests/e2e/test_sglang.py -k sglang >"$told" 2>&1 &
sglang=$!
trap 'kill $sglang 2>/dev/null; rm -f "$told"' EXIT
status=0
"$python" -m pytest --ignore tests/sglang --ignore tests/e2e --ignore tests/browser -k "not sglang" || status=1
wait $sglang || status=1
cat "$told"
"$python" -m pytest tests/e2e tests/browser -k "not sglang" || status=1
exit $status
