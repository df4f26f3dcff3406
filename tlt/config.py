"""Job and session specs: frozen, each value within its bounds."""

import math
from pathlib import Path
from typing import Literal

import msgspec

from tlt.ids import JobId
from tlt.strategies import Draft, Ngram, Off, Strategy, max_drafts

LOGGERS = ("tensorboard", "wandb", "trackio", "opentelemetry")
# Each row of a batch verifies that many at once, needed or not
_MOST_GUESSES = 64


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a spec. Subclasses state their own bounds in __post_init__."""


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


class PolicySpec(Section, frozen=True, kw_only=True):
    path: str
    max_context: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _require(self.max_context is None or self.max_context > 0, "max_context must be above 0")


class DataSpec(Section, frozen=True, kw_only=True):
    train: str
    eval: str | None = None
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    chat_template: bool = False
    system_prompt: str | None = None
    eval_limit: int | None = None

    def __post_init__(self) -> None:
        _require(self.eval_limit is None or self.eval_limit > 0, "eval_limit must be above 0")


class RewardSpec(Section, frozen=True, kw_only=True):
    """`kind: function` takes `function: package.module:name` (or file.py:name)."""

    kind: Literal["final_answer", "numeric", "regex", "boxed", "function"]
    marker: str = "#"
    pattern: str | None = None
    tolerance: float = 1e-6
    function: str | None = None
    timeout_seconds: float = 10.0
    on_error: float = 0.0

    def __post_init__(self) -> None:
        _require(self.timeout_seconds > 0, "timeout_seconds must be above 0")
        _require(self.marker != "", "marker must not be empty")
        _require(self.tolerance >= 0, "tolerance must be 0 or more")
        _require(math.isfinite(self.on_error), "on_error must be a finite number")
        _require(self.kind != "regex" or self.pattern is not None, "kind regex needs a pattern")
        _require(
            self.kind != "function" or self.function is not None,
            "kind function needs function: package.module:name",
        )


class AlgorithmSpec(Section, frozen=True, kw_only=True):
    """`precision`, `attention` and `compile` are found out on the machine unless they are given.

    `old_logprobs: auto` takes the sampler's where they are found to be the learner's.
    """

    name: Literal["grpo"] = "grpo"
    steps: int
    prompts_per_step: int
    group_size: int
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    minibatches: int = 1
    microbatch_tokens: int = 8192
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0
    averaging: Literal["token", "sequence"] = "token"
    normalise_advantage: bool = True
    importance_cap: float = 2.0
    gradient_clip: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["auto", "padded", "packed", "native"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    old_logprobs: Literal["auto", "learner"] = "auto"
    gradient_checkpointing: bool = False
    allow_filtered_sampling: bool = False
    checkpoint_every: int = 10
    eval_every: int = 0
    keep_best: bool = True
    # checkpoints, and policies that were the best: otherwise only the newest stays
    keep_all: bool = False
    collective_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps must be at least 1")
        _require(self.prompts_per_step >= 1, "prompts_per_step must be at least 1")
        _require(
            self.group_size >= 2,
            "group_size must be at least 2: GRPO compares the answers of a group with each other",
        )
        _require(self.learning_rate > 0, "learning_rate must be above 0")
        _require(self.minibatches >= 1, "minibatches must be at least 1")
        _require(self.checkpoint_every >= 1, "checkpoint_every must be at least 1")
        _require(self.eval_every >= 0, "eval_every must be 0 (never) or more")
        _require(self.importance_cap >= 1, "importance_cap must be at least 1")
        _require(self.microbatch_tokens >= 1, "microbatch_tokens must be at least 1")
        _require(self.kl_coefficient >= 0, "kl_coefficient must be 0 or more")
        _require(self.warmup_steps >= 0, "warmup_steps must be 0 or more")
        _require(self.weight_decay >= 0, "weight_decay must be 0 or more")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas must lie in [0, 1)")
        _require(0 < self.clip_low < 1, "clip_low must lie between 0 and 1")
        _require(self.clip_high > 0, "clip_high must be above 0")
        _require(self.gradient_clip > 0, "gradient_clip must be above 0")
        _require(self.collective_timeout_seconds > 0, "collective_timeout_seconds must be above 0")


class RolloutSpec(Section, frozen=True, kw_only=True):
    """A rank decodes up to `slots` answers together. With `spread`, each worker leaves the others
    their part of a round when it begins, even where it has room for all. Without it, who comes
    first may take everything, and the others are free to train the drafter.
    """

    engine: Literal["native", "sglang"] = "native"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 1024
    slots: int = 16
    spread: bool = True
    stop: list[str] = []
    eval_temperature: float = 1.0
    max_tries: int = 3

    def __post_init__(self) -> None:
        _require(self.temperature > 0, "temperature must be above 0")
        _require(self.eval_temperature >= 0, "eval_temperature must be 0 (greedy) or more")
        _require(self.top_k >= 0, "top_k must be 0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p must lie in (0, 1]")
        _require(0 <= self.min_p < 1, "min_p must lie in [0, 1)")
        _require(self.max_new_tokens >= 1, "max_new_tokens must be at least 1")
        _require(self.slots >= 1, "slots must be at least 1")
        _require(self.max_tries >= 1, "max_tries must be at least 1")

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class SpeculationSpec(Section, frozen=True, kw_only=True):
    """`static` decodes with `strategy`, always; `adaptive` chooses for each batch.

    To choose from there are the drafter's chains of `depths` tokens, with and without the policy's
    noise, up to `ngrams` tokens that followed the same words before, and no guessing at all.

    `control_share` of the rounds decode without any: what speculation saves is measured against
    them.
    """

    mode: Literal["off", "static", "adaptive"] = "off"
    strategy: Strategy | None = None
    depths: tuple[int, ...] = (2, 4, 6, 8, 12)
    ngrams: tuple[int, ...] = (4, 8)
    # what the index of past words may hold, on each rank
    ngram_megabytes: int = 64
    control_share: float = 0.02

    def __post_init__(self) -> None:
        _require(
            (self.mode == "static") == (self.strategy is not None),
            "mode static needs a strategy, and only that does: "
            "{type: draft, depth: 4} or {type: ngram, tokens: 8}",
        )
        most = max(map(max_drafts, self.arms), default=0)
        least = min((max_drafts(a) for a in self.arms if a != Off()), default=1)
        _require(least >= 1, "at least 1 token must be guessed; mode off guesses none")
        _require(most <= _MOST_GUESSES, f"at most {_MOST_GUESSES} tokens can be guessed at once")
        _require(self.ngram_megabytes > 0, "ngram_megabytes must be above 0")
        _require(
            0 <= self.control_share < 0.5, "control_share must be 0 (no control) or more, below 0.5"
        )

    @property
    def arms(self) -> tuple[Strategy, ...]:
        """The ways to decode that may be chosen."""
        match self.mode:
            case "off":
                return ()
            case "static":
                return () if self.strategy is None else (self.strategy,)
            case "adaptive":
                drafts = [Draft(depth=d, noise=n) for d in self.depths for n in (True, False)]
                return (Off(), *drafts, *(Ngram(tokens=n) for n in self.ngrams))

    @property
    def longest(self) -> int:
        return max(map(max_drafts, self.arms), default=0)


class DrafterSpec(Section, frozen=True, kw_only=True):
    """`path`: the drafter to begin with, a folder that `tlt drafter train` wrote, or SGLang loads.

    One that does not fit the policy is refused when it is loaded, and the job goes on without.
    Idle workers train it: `auto` when that pays, `always` whenever they can. Without a path they
    begin with random weights in this `layout`.
    """

    path: str | None = None
    train: Literal["off", "auto", "always"] = "off"
    layout: Literal["eagle", "eagle3"] = "eagle"
    # what each rank may keep of answers to learn from, states included; and as much again of
    # answers that it is still writing, for others to learn from
    megabytes: int = 256
    # micro-batches of all members together between two drafters that are measured
    merge_every: int = 48
    # a worker that takes longer to stop gets fresh ranks
    preempt_seconds: float = 10.0
    # all that were used stay in the run's folder, not the newest alone
    keep_all: bool = False

    def __post_init__(self) -> None:
        _require(self.megabytes >= 1, "megabytes must be at least 1")
        _require(self.merge_every >= 1, "merge_every must be at least 1")
        _require(0 < self.preempt_seconds < math.inf, "preempt_seconds must be above 0 and finite")


class WorkersSpec(Section, frozen=True, kw_only=True):
    stuck_seconds: float = 120.0
    max_restarts: int = 5

    def __post_init__(self) -> None:
        _require(0 < self.stuck_seconds < math.inf, "stuck_seconds must be above 0 and finite")
        _require(self.max_restarts >= 0, "max_restarts must be 0 or more")


class JobSpec(Section, frozen=True, kw_only=True):
    name: str = "job"
    policy: PolicySpec
    data: DataSpec
    reward: RewardSpec
    algorithm: AlgorithmSpec
    rollout: RolloutSpec = RolloutSpec()
    speculation: SpeculationSpec = SpeculationSpec()
    drafter: DrafterSpec = DrafterSpec()
    workers: WorkersSpec = WorkersSpec()
    # each step's figures are written to these, too; opentelemetry is sent its spans
    loggers: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for logger in self.loggers:
            _require(
                logger in LOGGERS, f"loggers: no logger '{logger}'; known: {', '.join(LOGGERS)}"
            )
        _require(len(set(self.loggers)) == len(self.loggers), "loggers: one is named twice")
        _require(0 <= self.seed < 2**63, "seed must lie in [0, 2^63)")
        _require(
            self.name != "" and all(c.isalnum() or c in "-_." for c in self.name),
            "name may hold letters, digits, '-', '_' and '.' only",
        )
        _require(
            not self.rollout.filtered or self.algorithm.allow_filtered_sampling,
            "training on samples drawn with top_k, top_p or min_p is biased; "
            "set algorithm.allow_filtered_sampling: true to do it all the same",
        )
        _require(
            self.algorithm.eval_every == 0 or self.data.eval is not None,
            "algorithm.eval_every needs data.eval",
        )
        _require(
            self.speculation.mode == "off" or self.rollout.engine == "native",
            "speculation needs rollout.engine: native",
        )
        _require(
            not isinstance(self.speculation.strategy, Draft)
            or self.drafter.path is not None
            or self.drafter.train != "off",
            "speculation.strategy asks a drafter; drafter.path names none, and none is trained",
        )
        guesses_with_it = any(isinstance(arm, Draft) for arm in self.speculation.arms)
        _require(
            self.drafter.train == "off" or guesses_with_it,
            "a drafter is trained that nobody asks: set speculation.mode: adaptive",
        )
        longest = self.speculation.longest
        room = min(self.rollout.max_new_tokens, self.policy.max_context or 2**62)
        _require(
            longest < room,
            f"speculation guesses {longest} tokens at once, and an answer has room for {room}",
        )


class SessionSpec(Section, frozen=True, kw_only=True):
    """What `tlt up` starts; every process of the session is given it."""

    name: str
    # the session's own: Redis, logs, its journal
    folder: str
    # a folder for each job
    runs: str
    # shared memory, gone with the session
    flight: str
    redis_url: str
    workers: int = 2
    ranks_per_worker: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    lease_seconds: float = 15.0
    heartbeat_seconds: float = 0.5

    def job_flight(self, job: JobId) -> Path:
        """Of a job's shared memory, gone with the job."""
        return Path(self.flight) / job
