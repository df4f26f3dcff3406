"""Rows are read completely; wrong ones are named with their file and line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tlt.base.id_types import PromptIndex
from tlt.data.dataset import Prompt, Prompts, prompts_file, rows
from tlt.errors import DataError
from tlt.spec.config import DataSpec
from tlt.spec.prompt_files import train_files

GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'


def read(path: Path, **changes: Any) -> list[tuple[str, dict[str, Any]]]:
    return list(rows(train_files(DataSpec(train=str(path), **changes))[0]))


def complaint(path: Path, **changes: Any) -> str:
    with pytest.raises(DataError) as error:
        read(path, **changes)
    return str(error.value)


def jsonl(folder: Path, content: bytes) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(content)
    return path


def test_reads_rows_with_their_locations(tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD + b"\n  \n" + '{"prompt":"ü","answer":[1]}'.encode())
    assert read(path) == [
        (f"{path}:1", {"prompt": "1+1=", "answer": "2"}),
        (f"{path}:4", {"prompt": "ü", "answer": [1]}),
    ]


def test_reads_windows_line_ends(tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD.replace(b"\n", b"\r\n") * 2)
    assert [location for location, _ in read(path)] == [f"{path}:1", f"{path}:2"]


def test_reads_keys_that_the_user_chose(tmp_path: Path) -> None:
    path = jsonl(tmp_path, b'{"question": [{"role": "user", "content": "?"}]}')
    assert len(read(path, prompt_key="question", answer_key=None)) == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": \n', "not valid JSON: "),
        (b'{"prompt": "x", "answer": NaN}\n', "not valid JSON: "),
        (b'{"prompt": "\xff", "answer": "2"}\n', "not valid JSON: "),
        (b"[" * 100_000 + b"\n", "not valid JSON: "),
        (b"[1]\n", "a row is a JSON object"),
        (b"{}\n", "no key 'prompt' (data.prompt_key); it has none"),
        (b'{"text": 1, "a": 2}\n', "no key 'prompt' (data.prompt_key); it has a, text"),
        (b'{"prompt": null, "answer": 1}\n', "no key 'prompt' (data.prompt_key)"),
        (b'{"prompt": 3, "answer": 1}\n', "'prompt' is neither text nor a list of messages"),
        (b'{"prompt": "", "answer": 1}\n', "'prompt' is neither text nor a list of messages"),
        (b'{"prompt": "x"}\n', "no key 'answer' (data.answer_key)"),
    ],
)
def test_names_a_wrong_row_with_its_line(line: bytes, expected: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD + b"\n" + line + GOOD)
    assert complaint(path).startswith(f"{path}:3: {expected}")


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_refuses_an_empty_file(content: bytes, tmp_path: Path) -> None:
    path = jsonl(tmp_path, content)
    assert complaint(path) == f"{path}: it has no rows"


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path / "none.parquet"):
        assert complaint(path) == f"{path}: no such file"


# --- parquet


def parquet(folder: Path, columns: dict[str, list[Any]]) -> Path:
    path = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_reads_parquet_rows_with_their_locations(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": ["a", "b", "c"], "answer": [1, 2, 3]})
    assert read(path)[2] == (f"{path}: row 3", {"prompt": "c", "answer": 3})


def test_refuses_a_parquet_row_without_a_prompt(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": ["a", "b", None], "answer": [1, 2, 3]})
    assert complaint(path).startswith(f"{path}: row 3: no key 'prompt'")


def test_refuses_parquet_without_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": [], "answer": []})
    assert complaint(path) == f"{path}: it has no rows"


@pytest.mark.parametrize("spoil", ["text", "empty", "end", "pages"])
def test_refuses_broken_parquet(spoil: str, tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": [f"prompt {n}" for n in range(500)], "answer": [1] * 500})
    whole = path.read_bytes()
    middle = len(whole) // 4
    spoilt = {
        "text": b"prompt,answer\n",
        "empty": b"",
        "end": whole[:-20],
        "pages": whole[:4] + b"\xff" * middle + whole[4 + middle :],
    }
    path.write_bytes(spoilt[spoil])
    assert complaint(path).startswith(f"{path}: cannot be read: ")


def write_arrow(file: Path, values: list[str], as_file: bool) -> None:
    table = pyarrow.table({"prompt": values, "answer": ["1"] * len(values)})
    opened = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with opened(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("as_file", [True, False])
def test_reads_what_datasets_has_saved(tmp_path: Path, as_file: bool) -> None:
    """`save_to_disk` writes a stream of Arrow in parts, beside files of its own."""
    (tmp_path / "dataset_info.json").write_text("{}")
    for part in range(2):
        name = f"data-0000{part}-of-00002.arrow"
        write_arrow(tmp_path / name, [f"{part}{n}" for n in range(3)], as_file)
    found = [row["prompt"] for _, row in read(tmp_path)]
    assert found == ["00", "01", "02", "10", "11", "12"]


def test_reads_a_folder_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "y", "answer": 1}\n')
    parquet(tmp_path, {"prompt": ["z"], "answer": [1]})
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x", "answer": 1}\n')
    (tmp_path / "README.md").write_text("no rows")
    found = read(tmp_path)
    assert sorted(row["prompt"] for _, row in found) == ["x", "y", "z"]
    assert [location.partition(":")[0] for location, _ in found] == sorted(
        location.partition(":")[0] for location, _ in found
    )


def test_names_a_folder_without_data_and_broken_arrow(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no rows")
    assert "no file ends with .jsonl, .parquet, .arrow" in complaint(tmp_path)
    broken = tmp_path / "x.arrow"
    broken.write_bytes(b"nothing")
    assert complaint(broken).startswith(f"{broken}: cannot be read: ")


# --- prompts by index


PROMPTS = [
    Prompt(tokens=(1, 2), row={"prompt": "a\nb", "nested": {"x": [1.5, None]}}, answer="ü"),
    Prompt(tokens=(), row={"prompt": "", "long": 10**30}),
    Prompt(tokens=(3,) * 500, row={}, answer=[1]),
]


def test_finds_prompts_by_index(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, "train")
    assert Prompts.write(path, iter(PROMPTS)) == 3
    prompts = Prompts(path)
    assert len(prompts) == 3
    for index in (2, 0, 1, 2):
        assert prompts[PromptIndex(index)] == PROMPTS[index]
    with pytest.raises(IndexError):
        prompts[PromptIndex(3)]
    prompts.close()


def test_writes_every_row_that_can_be_read(tmp_path: Path) -> None:
    row = {"prompt": "x", "answer": 10**30, "text": "\u2028\x00", "float": 1e300}
    path = jsonl(tmp_path, json.dumps(row).encode() + b"\n")
    ((_, found),) = read(path)
    Prompts.write(tmp_path / "out.jsonl", [Prompt(tokens=(1,), row=found, answer=found["answer"])])
    prompts = Prompts(tmp_path / "out.jsonl")
    assert prompts[PromptIndex(0)].row == row
    prompts.close()


def test_jsonl_needs_no_pyarrow(tmp_path: Path) -> None:
    """pyarrow is an optional dependency."""
    path = jsonl(tmp_path, GOOD)
    (tmp_path / "x.parquet").touch()
    program = (
        "import sys; sys.modules['pyarrow'] = None; from pathlib import Path\n"
        "from tlt.spec.config import DataSpec; from tlt.data.dataset import rows\n"
        "from tlt.spec.prompt_files import train_files\n"
        "files = [train_files(DataSpec(train=path))[0] for path in sys.argv[1:]]\n"
        "print(len(list(rows(files[0]))))\n"
        "try: list(rows(files[1]))\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(tmp_path / "x.parquet")],
        capture_output=True,
        text=True,
        check=True,
    )
    advice = "this needs pyarrow: pip install pyarrow"
    assert done.stdout == f"1\n{tmp_path}/x.parquet: {advice}\n"
