#!/usr/bin/env bash
# Run the tests on two cores: tests/run.sh PYTHON [OPTIONS OF PYTEST]
set -uo pipefail
python=$1
shift
beside_output=$(mktemp)

# SGLang takes over the process that imports it, so its tests have a process of their own. They run
# beside tests that need one core only, and are the shorter half, so a few of those follow them.
beside() {
    local status=0
    trap 'kill $child 2>/dev/null' TERM
    "$python" -m pytest "$@" tests/engine tests/sglang tests/e2e/test_sglang.py \
        tests/e2e/test_sglang_faults.py -k sglang &
    child=$!
    wait $child || status=1
    "$python" -m pytest "$@" tests/engine tests/memory_plan -k "not sglang" &
    child=$!
    wait $child || status=1
    return $status
}

beside "$@" >"$beside_output" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null; rm -f "$beside_output"' EXIT
status=0
"$python" -m pytest "$@" --ignore tests/sglang --ignore tests/engine --ignore tests/memory_plan \
    --ignore tests/e2e --ignore tests/chaos --ignore tests/browser -k "not sglang" || status=1
wait $beside || status=1
cat "$beside_output"
"$python" -m pytest "$@" tests/e2e tests/chaos tests/browser -k "not sglang" || status=1
exit $status
