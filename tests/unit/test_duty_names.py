"""Tables and the page name a duty, a phase and a decision alike."""

import re
from pathlib import Path
from typing import get_args

import tlt
from tlt.policies.run.run_state import Duty, Phase
from tlt.protocol.commands import DrafterDecision
from tlt.report.duties import AWAY, DUTY_NAMES, PHASE_NAMES, WAITING

_PAGE = (Path(tlt.__file__).parent / "dashboard" / "static" / "names.js").read_text()


def _names_on_the_page(table: str) -> dict[str, str]:
    body = _PAGE.partition(f"export const {table} = {{")[2].partition("};")[0]
    return dict(re.findall(r'(\w+): "(.+)",', body))


def test_tables_and_the_page_have_the_same_names() -> None:
    assert _names_on_the_page("DUTY_NAMES") == DUTY_NAMES
    assert _names_on_the_page("PHASE_NAMES") == PHASE_NAMES


def test_each_duty_phase_and_decision_has_a_name() -> None:
    assert set(DUTY_NAMES) == {*(duty.value for duty in Duty), WAITING, AWAY}
    assert set(PHASE_NAMES) == {phase.value for phase in Phase}
    assert set(_names_on_the_page("DECISION_NAMES")) == set(get_args(DrafterDecision))
