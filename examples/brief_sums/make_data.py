"""Write train.jsonl and eval.jsonl: python make_data.py [folder]."""

import json
import random
import sys
from pathlib import Path

SEED = 20
COUNTS = {"train": 512, "eval": 256}
# one step of the working, "12+34:2+4=06,1+3+0=04>46;", and the answer, "#46"
STEP_CHARACTERS, ANSWER_CHARACTERS = 25, 3


def row(terms: list[int]) -> dict[str, str | int]:
    return {
        "question": "+".join(f"{term:02d}" for term in terms) + "=",
        "target": f"{sum(terms) % 100:02d}",
        "enough": STEP_CHARACTERS * (len(terms) - 1) + ANSWER_CHARACTERS,
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    rng = random.Random(SEED)
    distinct: dict[tuple[int, ...], None] = {}
    while len(distinct) < sum(COUNTS.values()):
        distinct[tuple(rng.randrange(100) for _ in range(rng.randint(2, 6)))] = None
    rows = (row(list(terms)) for terms in distinct)
    for name, count in COUNTS.items():
        lines = [json.dumps(next(rows)) + "\n" for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
