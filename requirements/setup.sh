#!/usr/bin/env bash
# Make .venv with the exact versions of cpu.lock, or of cuda.lock with DEVICE=cuda. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
lock=requirements/${DEVICE:-cpu}.lock
[ -f "$lock" ] || { echo "DEVICE is cpu or cuda, not $DEVICE" >&2; exit 2; }
"$python" - <<'CHECK'
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 13):
    sys.exit(f"tlt needs Python 3.11 or 3.12, this is {sys.version.split()[0]}: make PYTHON=python3.12 …")
CHECK
echo "setting up .venv (a minute or two, once)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
torch=$(grep '^torch==' "$lock")
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps "$torch"
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r "$lock"
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/reasoning-gym.lock ||
    echo "without reasoning-gym: one of its packages needs a C compiler and Python's headers" >&2
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
