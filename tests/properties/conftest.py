"""HYPOTHESIS_PROFILE=random runs more examples, with another seed each time."""

import os

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=120,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "random", deadline=None, max_examples=5000, suppress_health_check=_SLOW, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
