"""A job fails by name once its updates make no optimiser step any more."""

import msgspec
import pytest

from tests.properties.test_keeping_answers import started
from tlt.policies.run.coordinator import count_skipped
from tlt.policies.run.run_state import Turn
from tlt.protocol.commands import EndJob
from tlt.protocol.shared_values import UpdateMetrics

NOTHING = UpdateMetrics(**dict.fromkeys(UpdateMetrics.__struct_fields__, 0))
HEALTHY = msgspec.structs.replace(NOTHING, optimiser_steps=2)
PARTLY = msgspec.structs.replace(HEALTHY, optimiser_steps=1, skipped_steps=1)
SKIPPED = msgspec.structs.replace(NOTHING, skipped_steps=2)


@pytest.mark.parametrize(
    ("updates", "fails"),
    [
        ([SKIPPED] * 5, True),
        ([SKIPPED] * 4, False),
        ([*[SKIPPED] * 4, HEALTHY, *[SKIPPED] * 4], False),
        ([*[SKIPPED] * 4, PARTLY, *[SKIPPED] * 4], False),
        ([*[SKIPPED] * 4, NOTHING, None, SKIPPED], True),
    ],
)
def test_five_updates_in_a_row_without_a_step_fail_the_job(
    updates: list[UpdateMetrics | None], fails: bool
) -> None:
    turn = Turn(started("off")[0], 0.0)
    for metrics in updates:
        count_skipped(turn, metrics)
    ended = [command for command in turn.commands if isinstance(command, EndJob)]
    assert [command.status for command in ended] == (["failed"] if fails else [])
    if fails:
        assert "5 policy updates in a row were not finite" in (ended[0].error or "")
