"""Inject 200 seeded faults into live jobs: `python -m tests.chaos`, as a benchmark."""

from tests.chaos.__main__ import main

if __name__ == "__main__":
    main()
