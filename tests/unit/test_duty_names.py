"""The page knows every duty and every decision."""

import re
from pathlib import Path
from typing import get_args

import tlt
from tlt.policies.run.run_state import Duty
from tlt.protocol.commands import DrafterDecision
from tlt.report.duties import AWAY, NEXT_STEP, WAITING_FOR_WEIGHTS

_STATIC = Path(tlt.__file__).parent / "dashboard" / "static"
_DUTIES = {*(duty.value for duty in Duty), NEXT_STEP, WAITING_FOR_WEIGHTS, AWAY}


def _names(table: str) -> str:
    return (_STATIC / "names.js").read_text().partition(f"export const {table} = ")[2]


def test_each_duty_is_drawn_and_has_a_colour_and_a_legend() -> None:
    assert set(re.findall(r'"(\w+)"', _names("DUTIES").partition("];")[0])) == _DUTIES
    sheet = (_STATIC / "style.css").read_text()
    assert set(re.findall(r"^  --(\w+): ", sheet, re.MULTILINE)) >= _DUTIES
    assert set(re.findall(r"\.swatch-(\w+) ", sheet)) >= _DUTIES


def test_each_decision_has_a_text() -> None:
    texts = re.findall(r'(\w+): ".+",', _names("DECISION_NAMES").partition("};")[0])
    assert set(texts) == set(get_args(DrafterDecision))
