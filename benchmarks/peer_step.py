"""Compare a GRPO step of SmolLM2-135M by TRL's trainer with TLT's: same prompts, cores and sizes.

`python -m benchmarks.peer_step --out F.json [--steps 3]`

TRL runs in an environment of its own. Its generators, numbers of threads and sizes of an update's
pass are tried one after another; the best take turns with TLT, a step each. A step has the same 16
prompts with 8 answers each and one update by AdamW, in float32; answers are drawn anew, so tokens a
second are told as well.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from benchmarks.peer_environment import run_with_peers
from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, run, session
from examples.smollm2.prepare import prepare
from tlt.data.reasoning_gym_tasks import entry_of, gym_rows, open_dataset
from tlt.rewards.kinds.reasoning_gym_scores import stated_answer
from tlt.spec.spec_files import load_job_spec

_SPEC = ROOT / "examples" / "smollm2" / "job.yaml"
_DEFAULTS = ("rollout.slots=auto", "algorithm.microbatch_tokens=auto")
_ONE_STEP = ("algorithm.steps=1", "algorithm.eval_every=0", "data.eval=null")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    policy: str = ""
    generator: str = "dynamic"
    # generate under autocast; the update stays in float32
    bfloat16: bool = False
    threads: int = 2
    seed: int = 1
    # sequences of a forward and backward pass
    sequences: int = 32

    @property
    def name(self) -> str:
        dtype = "bfloat16" if self.bfloat16 else "float32"
        return f"{self.generator}, {dtype}, {self.threads} threads, {self.sequences} sequences"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    rollout: float
    update: float
    tokens: int
    # ours leaves groups out of the update whose answers have the same reward; TRL computes them
    uniform_groups: int | None = None

    @property
    def seconds(self) -> float:
        return self.rollout + self.update


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    step: Step | None = None
    error: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trl", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl is not None:
        settings, out = arguments.trl
        Path(out).write_bytes(
            msgspec.json.encode(_run_trl(msgspec.json.decode(settings, type=Settings)))
        )
        return
    began = time.monotonic()
    # otherwise torch's threads loop while they wait, and take the core from each other
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    policy = str(prepare(print))
    trials = dict[str, Trial]()
    best = _sweep(policy, trials)
    steps = {name: list[Step]() for name in ("trl", "off", "adaptive")}
    with session():
        # a session's first job also fills caches
        _own_step("off", 9, policy)
        for seed in range(1, arguments.steps + 1):
            steps["off"].append(_own_step("off", seed, policy))
            chosen = msgspec.structs.replace(best, seed=seed)
            steps["trl"].append(_require(chosen, _try(chosen)))
            steps["adaptive"].append(_own_step("cold", seed, policy))
    details = {
        "version": _version(),
        "best": best.name,
        **{name: _describe(found) for name, found in steps.items()},
        "tried": {name: _described(trial) for name, trial in trials.items()},
    }
    write_result("peer_step", _claims(steps), details, time.monotonic() - began, arguments.out)


def _claims(steps: Mapping[str, Sequence[Step]]) -> list[Claim]:
    """Compare steps, and seconds for each token, as a longer answer takes longer."""

    def claim(name: str, cost: Callable[[Step], float]) -> Claim:
        trl, ours = (median(map(cost, steps[stack])) for stack in ("trl", "off"))
        return Claim(name=f"peer_step.{name}", value=round(trl / ours, 3), unit="x", bar=1)

    return [
        claim("trl_over_ours", lambda step: step.seconds),
        claim("trl_over_ours_per_token", lambda step: step.seconds / step.tokens),
    ]


def _sweep(policy: str, trials: dict[str, Trial]) -> Settings:
    """Return the fastest generator with the fastest size of an update and number of threads."""
    first = [
        Settings(policy=policy, sequences=8),
        Settings(policy=policy, generator="static", sequences=32),
        Settings(policy=policy, generator="continuous", sequences=128),
        Settings(policy=policy, bfloat16=True, sequences=32),
    ]
    found = [(settings, _try(settings)) for settings in first]
    steps = [(settings, trial.step) for settings, trial in found if trial.step is not None]
    generation, _ = min(steps, key=lambda each: each[1].rollout / each[1].tokens)
    update, _ = min(steps, key=lambda each: each[1].update / each[1].tokens)
    best = msgspec.structs.replace(generation, sequences=update.sequences)
    last = [msgspec.structs.replace(best, threads=threads) for threads in (1, 2)]
    found += (again := [(settings, _try(settings)) for settings in last])
    trials |= {settings.name: trial for settings, trial in found}
    return min(again, key=lambda each: _require(*each).seconds / _require(*each).tokens)[0]


def _try(settings: Settings) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "trial.json")
        text = msgspec.json.encode(settings).decode()
        run_with_peers("benchmarks.peer_step", "--trl", text, str(out))
        trial = msgspec.json.decode(out.read_bytes(), type=Trial)
    print(f"TRL, {settings.name}: {_described(trial)}", flush=True)
    return trial


def _require(settings: Settings, trial: Trial) -> Step:
    if trial.step is None:
        raise SystemExit(f"TRL, {settings.name}: {trial.error}")
    return trial.step


def _own_step(stack: str, seed: int, policy: str) -> Step:
    changes = (*_DEFAULTS, *_ONE_STEP, f"data.train={_source()}", f"policy.path={policy}")
    job = run(stack, seed, *changes, spec=_SPEC)
    (step,), (summary,) = job.steps, job.snapshot.steps
    return Step(
        rollout=step.rollout,
        update=step.rest,
        tokens=summary.tokens,
        uniform_groups=summary.uniform_groups,
    )


def _source() -> str:
    """Return the spec's task with as many rows as a step has prompts."""
    job = load_job_spec(_SPEC)
    source = job.data.sources[0].path
    return f"{source.rpartition('size=')[0]}size={job.algorithm.prompts_per_step}"


def _describe(steps: Sequence[Step]) -> dict[str, Any]:
    tokens = math.fsum(step.tokens for step in steps)
    return {
        "rollout": [round(step.rollout, 2) for step in steps],
        "update": [round(step.update, 2) for step in steps],
        "tokens": [step.tokens for step in steps],
        "uniform_groups": [step.uniform_groups for step in steps],
        "tokens_per_rollout_second": round(tokens / math.fsum(s.rollout for s in steps), 1),
        "tokens_per_update_second": round(tokens / math.fsum(s.update for s in steps), 1),
    }


def _described(trial: Trial) -> dict[str, Any]:
    return {"error": trial.error} if trial.step is None else _describe([trial.step])


def _version() -> str:
    lines = (ROOT / "requirements" / "peers.lock").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith("trl=="))


def _run_trl(settings: Settings) -> Trial:
    """Make one step in the peers' environment, and time it."""
    torch.set_num_threads(settings.threads)
    trl: Any = import_module("trl")
    transformers: Any = import_module("transformers")
    timer: dict[str, float] = {}

    class Timed(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.monotonic()
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
                found = super()._generate_and_score_completions(inputs)
            timer["rollout"] = time.monotonic() - began
            timer["tokens"] = int(found["completion_mask"].sum())
            return found

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            timer["begin"] = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            timer["end"] = time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=transformers.AutoModelForCausalLM.from_pretrained(
                settings.policy, dtype=torch.float32
            ),
            args=_configure(trl, settings, folder),
            processing_class=transformers.AutoTokenizer.from_pretrained(settings.policy),
            reward_funcs=_score,
            train_dataset=_prompts(),
            callbacks=[Clock()],
        )
        try:
            trainer.train()
        except Exception as error:
            return Trial(error=f"{type(error).__name__}: {error}".splitlines()[0])
    update = timer["end"] - timer["begin"] - timer["rollout"]
    return Trial(step=Step(rollout=timer["rollout"], update=update, tokens=int(timer["tokens"])))


def _configure(trl: Any, settings: Settings, folder: str) -> Any:
    job = load_job_spec(_SPEC)
    answers = job.algorithm.prompts_per_step * job.algorithm.group_size
    return trl.GRPOConfig(
        output_dir=folder,
        max_steps=1,
        seed=settings.seed,
        per_device_train_batch_size=settings.sequences,
        gradient_accumulation_steps=answers // settings.sequences,
        num_generations=job.algorithm.group_size,
        max_completion_length=job.rollout.max_new_tokens,
        temperature=1.0,
        learning_rate=job.algorithm.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=job.algorithm.clip_low,
        epsilon_high=job.algorithm.clip_high,
        optim="adamw_torch",
        shuffle_dataset=False,
        cache_implementation="static" if settings.generator == "static" else None,
        use_transformers_continuous_batching=settings.generator == "continuous",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def _prompts() -> Any:
    source = _source()
    rows = [{"prompt": row["prompt"], "index": i} for i, (_, row) in enumerate(gym_rows(source))]
    return import_module("datasets").Dataset.from_list(rows)


def _score(completions: Sequence[str], index: Sequence[int], **_: Any) -> list[float]:
    source = _source()
    score = open_dataset(source).score_answer
    return [
        score(stated_answer(text), entry_of(source, row))
        for text, row in zip(completions, index, strict=True)
    ]


if __name__ == "__main__":
    main()
