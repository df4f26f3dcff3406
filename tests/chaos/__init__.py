"""Seeded faults in live sessions: `python -m tests.chaos` injects them and counts what is lost."""
