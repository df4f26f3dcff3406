"""Rows as verl's preprocessor of GSM8K and PRIME's of Eurus-2-RL-Data write them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k_row(index: int, question: str, answer: str, split: str = "train") -> dict[str, Any]:
    solution = re.search(r"#### (\-?[0-9\.\,]+)", answer)
    assert solution is not None
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def math_row(index: int, problem: str, solution: str) -> dict[str, Any]:
    return {
        "data_source": "numina_olympiads",
        "prompt": [{"role": "system", "content": "[ASSESS]"}, {"role": "user", "content": problem}],
        "ability": "math",
        "reward_model": {"ground_truth": solution, "style": "rule"},
        "extra_info": {"index": index, "split": "dummy"},
    }


def code_row(index: int, problem: str, tests: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": "taco",
        "prompt": [{"role": "system", "content": "[ASSESS]"}, {"role": "user", "content": problem}],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
        "extra_info": {"index": index, "split": "dummy"},
    }


def write_parquet(file: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Write nested columns; a row has nulls where only others have a part of one."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return str(file)
