"""A spec has one cure for the wait for long answers."""

import msgspec
import pytest

from tests.simulation.specs import small_spec


@pytest.mark.parametrize("key", ["partial", "defer_long"])
def test_refuses_two_cures_for_the_same_wait(key: str) -> None:
    spec = small_spec(staleness=1)
    rollout = msgspec.structs.replace(spec.rollout, **{key: 0.5})
    with pytest.raises(ValueError, match=rf"rollout\.{key} and algorithm\.staleness"):
        msgspec.structs.replace(spec, rollout=rollout)
