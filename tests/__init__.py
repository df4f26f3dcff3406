"""The tests; torch's threads don't loop for long where others run beside them."""

import os

# read when torch is imported; `tlt drafter train` does the same
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
