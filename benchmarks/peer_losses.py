"""Compare TLT's losses, advantages and corrections with those of TRL and verl.

`python -m benchmarks.peer_losses --out F.json` computes the peers' side anew, with their own code
in an environment of its own, and keeps it for the tests.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.own_losses import Output, compute_own
from benchmarks.peer_cases import CASES
from benchmarks.peer_environment import run_with_peers
from benchmarks.peer_inputs import make_inputs
from benchmarks.result import Claim, write_result

PEERS = Path(__file__).with_name("peer_outputs.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    run_with_peers("benchmarks.peer_outputs", str(PEERS))
    found, inputs = json.loads(PEERS.read_bytes()), make_inputs()
    rows = {
        case.key: differences(compute_own(case, inputs), found["cases"][case.key]) for case in CASES
    }
    claims = [
        Claim(
            name=f"peer_losses.{case.key}",
            value=max(rows[case.key].values()),
            unit="of the largest",
            bar=case.tolerance,
            less_is_better=True,
        )
        for case in CASES
    ]
    reasons = {case.key: case.reason for case in CASES if case.reason}
    details = {"versions": found["versions"], "differences": rows, "reasons": reasons}
    write_result("peer_losses", claims, details, time.monotonic() - began, arguments.out)


def differences(own: Output, peer: dict[str, Any]) -> dict[str, float]:
    """Return relative differences of the loss, and of its gradient or of other values.

    That of many is the largest, divided by the largest of the peer's.
    """
    scale = max(map(abs, peer["values"]))
    apart = (abs(ours - theirs) for ours, theirs in zip(own.values, peer["values"], strict=True))
    if own.loss is None:
        return {"values": max(apart) / scale}
    loss = abs(own.loss - peer["loss"]) / abs(peer["loss"])
    return {"loss": loss, "gradient": max(apart) / scale}


if __name__ == "__main__":
    main()
