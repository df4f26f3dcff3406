#!/usr/bin/env bash
# Run the tests on two cores: tests/run.sh PYTHON [OPTIONS OF PYTEST]
set -uo pipefail
python=$1
shift
sglang_output=$(mktemp)
# SGLang takes over the process that imports it, so its tests have a process of their own. It runs
# beside the tests that need one core only.
"$python" -m pytest "$@" tests/engine tests/sglang tests/e2e/test_sglang.py tests/e2e/test_sglang_faults.py \
    -k sglang >"$sglang_output" 2>&1 &
sglang=$!
trap 'kill $sglang 2>/dev/null; rm -f "$sglang_output"' EXIT
status=0
"$python" -m pytest "$@" --ignore tests/sglang --ignore tests/e2e --ignore tests/chaos --ignore tests/browser -k "not sglang" || status=1
wait $sglang || status=1
cat "$sglang_output"
"$python" -m pytest "$@" tests/e2e tests/chaos tests/browser -k "not sglang" || status=1
exit $status
