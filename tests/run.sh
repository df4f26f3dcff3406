#!/usr/bin/env bash
# Run the tests on two cores: tests/run.sh PYTHON [OPTIONS OF PYTEST]
set -uo pipefail
python=$1
shift
work=$(mktemp -d) || exit 1
child= other=
groups="rest engine trainer memory_plan"
trap 'kill $other 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT

run() {
    if [ -z "$beside" ]; then # in the foreground, where Ctrl-C ends it
        "$python" -m pytest "${options[@]}" "$@" || status=1
        return
    fi
    "$python" -m pytest "${options[@]}" "$@" &
    child=$!
    wait $child || status=1
}

# Run the groups of tests that need one core and that nobody has begun.
run_groups() {
    local group
    for group in $groups; do
        mkdir "$work/$group" 2>/dev/null || continue
        case $group in
        rest)
            run tests --ignore tests/sglang --ignore tests/engine --ignore tests/trainer \
                --ignore tests/memory_plan --ignore tests/e2e --ignore tests/chaos \
                --ignore tests/browser
            ;;
        engine) run tests/engine -k "not sglang" ;;
        *) run "tests/$group" ;;
        esac
    done
}

# SGLang takes over the process that imports it, so its tests have a process of their own.
run_beside() {
    beside=yes
    trap 'kill $child 2>/dev/null; exit 1' TERM
    run tests/engine tests/sglang tests/e2e/test_sglang.py tests/e2e/test_sglang_faults.py -k sglang
    run_groups
    return $status
}

options=("$@")
status=0
beside=
run_beside >"$work/beside" 2>&1 &
other=$!
run_groups
wait $other || status=1
cat "$work/beside"
for group in $groups; do
    [ -e "$work/$group" ] || status=1
done
run tests/e2e tests/chaos tests/browser --ignore tests/e2e/test_sglang.py \
    --ignore tests/e2e/test_sglang_faults.py
exit $status
