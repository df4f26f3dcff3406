"""Commands print the text that they are given."""

import pytest

from cli.output import complain, say


def test_texts_of_others_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[user] :smile: [bold]taskset:x: 1.5"
    say(text)
    complain(text)
    assert capsys.readouterr() == (f"{text}\n", f"tlt: {text}\n")
