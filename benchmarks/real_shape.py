"""Measure one worker with a policy of the shape of Qwen2.5-0.5B: whole steps, and its stops.

`python -m benchmarks.real_shape --out F.json`

The policy has random weights, the full vocabulary and a context of 2,048 tokens; rollouts are few
and short. First a whole job runs, with drafters trained and evaluated, and the memory of its rank
is watched. Then a rank by itself trains the drafter on long answers and is stopped at random.
"""

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.result import Claim, write_result
from benchmarks.stacks import Job, run, session
from cli.session_client import with_client
from tlt.actors.rank_process import RankProcess
from tlt.config import DrafterSpec, JobSpec
from tlt.id_types import (
    Attempt,
    DrafterVersion,
    Epoch,
    Incarnation,
    JobId,
    Member,
    PromptIndex,
    Step,
    WorkerId,
)
from tlt.models.config_json import read_config
from tlt.models.eagle_drafter import new_drafter
from tlt.protocol.commands import CloseJob, OpenJob, PromptIssued, StopDrafterTraining, TrainDrafter
from tlt.protocol.events import DrafterDeltaReady, DrafterTrainingStopped, RolloutFinished
from tlt.protocol.rank_messages import DecodePrompts, RankSetup
from tlt.protocol.refs import DrafterBase
from tlt.spec_files import load_job_spec
from tlt.trainer.drafter.initial_drafter import drafter_config_for

_JOB, _WORKER, _INCARNATION = JobId("real-shape"), WorkerId("worker-1"), Incarnation(1)
_VOCABULARY, _HIDDEN, _LAYERS = 151_936, 896, 24
_CONTEXT = 2048
_ANSWERS, _TOKENS = 4, 96
_STEPS = 3
# micro-batches; a step has a few
_MERGED = 4
_STOPS = 40
_SESSION_SECONDS = (0.5, 9.0)
_LONG_ANSWERS, _LONG_TOKENS = 2, 300
_ALONE = [
    "speculation.mode=adaptive",
    "drafter.train=always",
    f"rollout.max_new_tokens={_LONG_TOKENS}",
]
_FOUR_BYTES = 4
# copies of a drafter: weights, mean and momentum; root, base and four snapshots, each with its
# mean; the one in use
_DRAFTERS = 3 + 2 * (1 + 1 + 4) + 1
_SPECIALS = ("<pad>", "<bos>", "<eos>")
# a slow reward function: the worker idles while it waits for the last score
_COIN = """
import time

def coin(completion, **_):
    time.sleep(6)
    return float(len(completion) % 2)
"""
# measured over stated memory: allocators keep something
_ROOM = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as name:
        folder = Path(name)
        numbers = _write_policy(folder / "policy")
        stated = _stated_bytes(numbers, _drafter_bytes(folder / "policy"))
        spec = _write_spec(folder)
        with session(workers=1), _watch_memory() as seen:
            job = run(
                "cold", 1, "drafter.train=always", f"drafter.merge_every={_MERGED}", spec=spec
            )
        alone = asyncio.run(_measure_stops(folder, load_job_spec(spec, _ALONE)))
    assert job.snapshot.drafter_training is not None
    p95 = quantiles(alone.waits, n=20)[-1]
    claims = [
        Claim(
            name="real_shape.obeyed_p95", value=1000 * p95, unit="ms", bar=150, less_is_better=True
        ),
        Claim(
            name="real_shape.memory",
            value=max(seen) / sum(stated.values()),
            unit="of the stated bytes",
            bar=_ROOM,
            less_is_better=True,
        ),
        Claim(
            name="real_shape.micro_batches",
            value=job.snapshot.drafter_training.micro_batches,
            unit="in the job",
            bar=1,
        ),
        Claim(
            name="real_shape.measured",
            value=len(job.snapshot.drafter_training.evaluations),
            unit="drafters in the job",
            bar=1,
        ),
        Claim(
            name="real_shape.kept",
            value=alone.kept,
            unit="micro-batches beside the stops",
            bar=8,
        ),
        Claim(
            name="real_shape.state_bytes",
            value=alone.state_bytes / (_HIDDEN * _FOUR_BYTES),
            unit="of the stated bytes",
            bar=1.0,
            less_is_better=True,
        ),
    ]
    details = {
        "steps": [(round(s.rollout, 1), round(s.rest, 1)) for s in job.steps],
        "phases": {phase: round(s, 1) for phase, s in job.snapshot.phases.items()},
        "stopped_after_ms": [round(1000 * wait, 1) for wait in sorted(alone.waits)],
        "micro_batch_seconds": round(median(alone.typical), 3),
        "memory_stated_bytes": stated,
        "memory_peak_bytes": max(seen),
        "state_bytes_per_token": alone.state_bytes,
        "state_bytes_per_token_stated": _HIDDEN * _FOUR_BYTES,
        "drafter": _drafter(job),
    }
    write_result("real_shape", claims, details, time.monotonic() - began, out)


def _write_policy(folder: Path) -> int:
    """Write a random policy and its tokenizer; return the number of weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=4864,
        num_hidden_layers=_LAYERS,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a token for each byte, and words for the rest of the vocabulary."""
    known = [*_SPECIALS, *sorted(ByteLevel.alphabet())]
    words = [*known, *(f"w{number}" for number in range(len(known), _VOCABULARY))]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {f"{word[1:-1]}_token": word for word in _SPECIALS}
    text = json.dumps({"tokenizer_class": "Qwen2Tokenizer", **settings})
    (folder / "tokenizer_config.json").write_text(text)


def _write_spec(folder: Path) -> Path:
    """Write a spec whose reward is a coin: 1 for an odd number of characters, else 0."""
    (folder / "coin.py").write_text(_COIN)
    rows = [{"prompt": f"{i:02d}+" * 13, "answer": ""} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec: dict[str, Any] = {
        "name": "real-shape",
        "policy": {"path": "policy", "max_context": _CONTEXT},
        "data": {"train": "data.jsonl"},
        "reward": {"kind": "function", "function": "coin.py:coin"},
        "algorithm": {
            "steps": _STEPS,
            "prompts_per_step": 1,
            "group_size": _ANSWERS,
            "microbatch_tokens": 512,
            "checkpoint_every": 1000,
        },
        "rollout": {"max_new_tokens": _TOKENS, "slots": _ANSWERS},
        "workers": {"stuck_seconds": 600},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(spec))
    return path


@contextmanager
def _watch_memory() -> Generator[list[int]]:
    """Yield a list that grows by the peak memory of the ranks, in bytes, each second."""
    seen, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            workers = with_client("default", lambda client: client.workers())
            for pid in (pid for beat in workers.values() for pid in beat.rank_pids):
                seen.append(_peak(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)


def _stated_bytes(numbers: int, drafter: int) -> dict[str, int]:
    """Return the memory that a rank of this job needs, in bytes."""
    weights = numbers * _FOUR_BYTES
    return {
        "policy_to_decode_with": weights,
        "policy_to_learn": weights,
        "gradients": weights,
        "moments": 2 * weights,
        "weights_on_their_way": weights,
        "logits_of_a_micro_batch": 512 * _VOCABULARY * _FOUR_BYTES,
        "drafter": _DRAFTERS * drafter,
        "torch_and_the_rest": 1 << 30,
    }


def _drafter_bytes(policy: Path) -> int:
    config = drafter_config_for(read_config(policy), DrafterSpec().layout)
    with torch.device("meta"):
        drafter = new_drafter(config)
    return sum(parameter.nbytes for parameter in drafter.parameters())


def _drafter(job: Job) -> dict[str, Any]:
    found = job.snapshot.drafter_training
    assert found is not None
    return {
        "bought_seconds": round(found.reserved, 1),
        "preempted": found.stops,
        "preempt_p99_ms": round(1000 * found.stop_p99, 1),
        "micro_batches": found.micro_batches,
        "typical_seconds": round(found.median_seconds, 3),
        "canaries": [round(m.accept_length, 3) for m in found.evaluations],
    }


# --- a rank by itself


class _Stops(NamedTuple):
    # seconds from each stop command until the rank had stopped
    waits: list[float]
    # duration of a micro-batch, as the rank reported it at each stop
    typical: list[float]
    # micro-batches that it published
    kept: int
    # bytes of captured states per token
    state_bytes: float


async def _measure_stops(folder: Path, spec: JobSpec) -> _Stops:
    setup = RankSetup(
        worker=_WORKER,
        incarnation=_INCARNATION,
        rank=0,
        device="cpu",
        host="127.0.0.1",
        flight=str(folder / "flight"),
    )
    rank = await RankProcess.start(setup, cores=frozenset(), logs=folder / "logs")
    await rank.wait_ready(60.0)
    dice, waits, typical, kept = random.Random(1), list[float](), list[float](), 0
    rank.send(
        OpenJob(
            worker=_WORKER,
            incarnation=_INCARNATION,
            job=_JOB,
            epoch=Epoch(1),
            spec=spec,
            folder=str(folder / "run"),
        )
    )
    prompts = tuple(_prompt(member) for member in range(_LONG_ANSWERS))
    rank.send(DecodePrompts(job=_JOB, prompts=prompts))
    tokens, answers = 0, 0
    while answers < _LONG_ANSWERS:
        message = await rank.receive()
        if isinstance(message, RolloutFinished):
            answers += 1
            tokens += len(prompts[0].tokens) + message.length - 1
    states = folder / "flight" / _JOB / "states"
    captured = sum(file.stat().st_size for file in states.iterdir())
    for number in range(1, _STOPS + 1):
        rank.send(_train(number))
        # the first micro-batches are long, until their size is adapted
        await asyncio.sleep(20.0 if number == 1 else dice.uniform(*_SESSION_SECONDS))
        sent = time.monotonic()
        rank.send(
            StopDrafterTraining(
                worker=_WORKER, incarnation=_INCARNATION, job=_JOB, training_session=number
            )
        )
        message = await rank.receive()
        while not isinstance(message, DrafterTrainingStopped):
            kept += message.updates if isinstance(message, DrafterDeltaReady) else 0
            message = await rank.receive()
        waits.append(time.monotonic() - sent)
        if message.typical_seconds:
            typical.append(message.typical_seconds)
    rank.send(CloseJob(worker=_WORKER, incarnation=_INCARNATION, job=_JOB))
    rank.kill()
    return _Stops(waits, typical, kept, captured / tokens)


def _prompt(member: int) -> PromptIssued:
    return PromptIssued(
        job=_JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        purpose="train",
        prompt=PromptIndex(0),
        member=Member(member),
        tokens=tuple(range(10, 50)),
    )


def _train(session: int) -> TrainDrafter:
    first = DrafterVersion(0)
    return TrainDrafter(
        worker=_WORKER,
        incarnation=_INCARNATION,
        job=_JOB,
        step=Step(0),
        training_session=session,
        base=DrafterBase(version=first, root=first, weights=None, updates=0, micro_batches=0),
    )


if __name__ == "__main__":
    main()
