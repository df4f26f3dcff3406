"""An answer that is read is the one that was written, or there is an error."""

from pathlib import Path

import msgspec
import pytest

from tests.samples import written_answer
from tlt.blobs.answer_files import AnswerFiles
from tlt.errors import BlobError, BlobLost
from tlt.protocol.refs import OriginSpan


def test_returns_the_answers_that_were_written(tmp_path: Path) -> None:
    answers = AnswerFiles(tmp_path)
    first, second = answers.writer("1.0"), answers.writer("2.0")
    written = [
        written_answer([]),
        written_answer([7, 2**31 - 1, 0], origins=(OriginSpan(origin="plain", tokens=3),)),
        written_answer(range(70_000), text="\ud55c√" * 1000),
    ]
    refs = [writer.append(answer) for answer in written for writer in (first, second)]
    answers.sync(refs)
    assert [answers.read(ref) for ref in refs] == [each for each in written for _ in range(2)]
    assert answers.read(refs[2]).tokens == [7, 2**31 - 1, 0]
    assert answers.read(refs[2]).logprobs == [-0.5] * 3
    assert answers.writer("1.0").append(written[0]).offset == sum(ref.bytes for ref in refs[::2])


def test_refuses_an_answer_that_is_torn_or_damaged(tmp_path: Path) -> None:
    answers = AnswerFiles(tmp_path)
    whole, torn = (answers.writer("1.0").append(written_answer([7] * 9)) for _ in range(2))
    path = answers.folder / "1.0"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert answers.read(whole).tokens == [7] * 9
    with pytest.raises(BlobLost, match="are not the answer"):
        answers.read(torn)
    path.write_bytes(content.replace(b"\x07", b"\x08", 1))
    with pytest.raises(BlobLost, match="are not the answer"):
        answers.read(whole)
    gone = msgspec.structs.replace(whole, file="3.0")
    with pytest.raises(BlobLost, match="cannot be read"):
        answers.read(gone)
    with pytest.raises(BlobLost, match="cannot be read"):
        answers.sync([gone])


def test_says_where_an_answer_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("not a folder")
    with pytest.raises(BlobError, match=r"1\.0: cannot be written"):
        AnswerFiles(tmp_path).writer("1.0").append(written_answer([7]))
