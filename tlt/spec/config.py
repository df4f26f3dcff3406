"""A spec is frozen and valid: every value was checked against its bounds when it was made.

The comment above a field describes it in docs/spec.md, which docs/generate.py writes.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tlt.base.id_types import JobId
from tlt.base.strategies import Draft, Ngram, Off, Strategy, max_drafts
from tlt.spec.data_and_algorithm import HUB, AlgorithmSpec, DataSpec
from tlt.spec.environment import EnvironmentSpec, complain_of_environment
from tlt.spec.reward import RewardSpec, require_distinct
from tlt.spec.reward_sources import complain_of_sources
from tlt.spec.rollout import RolloutSpec
from tlt.spec.section import Section, require, unwritable_numbers

# tokens that a new drafter can propose: with more, their rows of the policy's head outweigh the
# drafter's layer in small policies, and the next as many would be drawn once in fifty times
HOT_TOKENS = 4096
LOGGERS = ("tensorboard", "wandb", "trackio", "opentelemetry")
# every row of a batch is verified as wide as the longest proposal
_MOST_GUESSES = 64
_HUB_ID = re.compile(rf"(?:{HUB})?(\w[\w.-]*/\w[\w.-]*)", re.ASCII)
# in a job's folder in shared memory: what its workers train the drafter on
HIDDEN_STATES = "states"


class LoraSpec(Section, frozen=True, kw_only=True):
    """Train an adapter of low rank beside the policy's weights, which stay as they are."""

    # Rank of the product that is added to a matrix.
    rank: int = 16
    # The adapter's product is multiplied by `alpha` / `rank`.
    alpha: int = 32
    # Share of the adapter's inputs that an update drops at random.
    dropout: float = 0.0
    # Names of the modules that get an adapter, such as `q_proj`; `all-linear` is all but the head.
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank must be at least 1")
        require(self.alpha >= 1, "alpha must be at least 1")
        require(0 <= self.dropout < 1, "dropout must lie in [0, 1)")
        require(len(self.targets) > 0, "targets must not be empty")


class PolicySpec(Section, frozen=True, kw_only=True):
    """Name the model to train."""

    # Folder of the policy in Hugging Face's layout or, where there is none, its id on the Hub:
    # `org/name`.
    path: str
    # Branch, tag or commit of a policy of the Hub; `main` if absent. A job keeps to the commit that
    # it begins with.
    revision: str | None = None
    # Most tokens of a prompt and its answer together; the model's own limit if absent.
    max_context: int | None = None
    # Number format in which the engine decodes; `auto` is bfloat16 on GPUs, float32 on CPUs.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # Train a LoRA adapter instead of the weights; `{}` for its defaults.
    lora: LoraSpec | None = None
    # Weights that aren't trained: patterns such as `model.embed_tokens.*` or `*.bias`.
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.max_context is None or self.max_context > 0, "max_context must be above 0")
        require(
            self.lora is None or not self.freeze,
            "lora trains no weight of the policy, so freeze has nothing to say",
        )

    @property
    def hub_id(self) -> str | None:
        """Return the policy's id on the Hub, or None for a folder."""
        found = _HUB_ID.fullmatch(self.path)
        return None if found is None else found[1]


class SpeculationSpec(Section, frozen=True, kw_only=True):
    """Choose how decoding guesses ahead; answers have the same distribution in every mode."""

    # `static` always decodes with `strategy`; `adaptive` chooses one for each batch; `auto` is
    # `adaptive`, or `off` for a job that can't speculate.
    mode: Literal["auto", "off", "static", "adaptive"] = "auto"
    # Strategy of mode `static`: `{type: draft, depth: 4}` or `{type: ngram, tokens: 8}`.
    strategy: Strategy | None = None
    # Lengths of the drafter's proposals that `adaptive` chooses from.
    depths: tuple[int, ...] = (2, 4, 6, 8, 12)
    # Lengths of n-gram proposals that `adaptive` chooses from.
    ngrams: tuple[int, ...] = (4, 8)
    # Memory of a rank's n-gram index.
    ngram_megabytes: int = 64
    # Share of the decoding that goes without speculation, to measure its savings.
    control_share: float = 0.02

    def __post_init__(self) -> None:
        require(
            (self.mode == "static") == (self.strategy is not None),
            "mode static needs a strategy, and only that does: "
            "{type: draft, depth: 4} or {type: ngram, tokens: 8}",
        )
        most = max(map(max_drafts, self.arms), default=0)
        least = min((max_drafts(a) for a in self.arms if a != Off()), default=1)
        require(least >= 1, "at least 1 token must be guessed; mode off guesses none")
        require(most <= _MOST_GUESSES, f"at most {_MOST_GUESSES} tokens can be guessed at once")
        require(self.ngram_megabytes > 0, "ngram_megabytes must be above 0")
        require(
            0 <= self.control_share < 0.5, "control_share must be 0 (no control) or more, below 0.5"
        )

    @property
    def arms(self) -> tuple[Strategy, ...]:
        """Return the strategies that may be chosen."""
        match self.mode:
            case "off":
                return ()
            case "static":
                return () if self.strategy is None else (self.strategy,)
            case "auto" | "adaptive":
                drafts = [Draft(depth=d, noise=n) for d in self.depths for n in (True, False)]
                return (Off(), *drafts, *(Ngram(tokens=n) for n in self.ngrams))

    @property
    def drafts(self) -> bool:
        """Return True if the drafter may be chosen."""
        return any(isinstance(arm, Draft) for arm in self.arms)

    @property
    def longest(self) -> int:
        return max(map(max_drafts, self.arms), default=0)


class DrafterSpec(Section, frozen=True, kw_only=True):
    """Set the drafter: where it comes from and when it is trained."""

    # Folder of the drafter to begin with; random weights if absent and `train` is on.
    path: str | None = None
    # `auto`: idle workers train it as long as evaluations get better, and once in a while where
    # steps are so short that its end delays them; `always`: in any case. If absent, it is `auto` in
    # a job that trains and may decode with the drafter, otherwise `off`.
    train: Literal["off", "auto", "always"] | msgspec.UnsetType = msgspec.UNSET
    # Layout of a drafter that begins with random weights.
    layout: Literal["eagle", "eagle3"] = "eagle"
    # Tokens that a drafter that begins with random weights can propose, those that the policy draws
    # most often: a number, or `all`; 4096 by default, and all of a smaller vocabulary.
    hot_tokens: int | Literal["all"] | msgspec.UnsetType = msgspec.UNSET
    # Memory of a rank for answers to train on, and as much again for unfinished ones.
    megabytes: int = 256
    # Micro-batches of all members together between two evaluations of the drafter; `auto`: members
    # train four times as long as the last evaluation and its merge took, and twice as long after
    # each evaluation in a row without a gain, up to eight times.
    merge_every: Literal["auto"] | int = "auto"
    # A worker that takes longer to stop drafter training gets fresh ranks.
    stop_seconds: float = 10.0
    # Keep every adopted drafter, not only the newest.
    keep_all: bool = False

    def __post_init__(self) -> None:
        require(self.megabytes >= 1, "megabytes must be at least 1")
        require(
            self.merge_every == "auto" or self.merge_every >= 1,
            "merge_every must be at least 1, or auto",
        )
        require(0 < self.stop_seconds < math.inf, "stop_seconds must be above 0 and finite")
        require(self.most_tokens is None or self.most_tokens >= 2, "hot_tokens must be at least 2")

    @property
    def most_tokens(self) -> int | None:
        """Return how many tokens a new drafter can propose; None for all."""
        # unset, it isn't written: earlier versions' journals have digests of specs without it
        if self.hot_tokens is msgspec.UNSET:
            return HOT_TOKENS
        return None if self.hot_tokens == "all" else self.hot_tokens


class WorkersSpec(Section, frozen=True, kw_only=True):
    """Set how many workers a job has, and what happens to those that fail."""

    # Workers of the session that the job has to itself; by default all of them. Jobs run at once
    # as long as there are enough.
    count: int | msgspec.UnsetType = msgspec.UNSET
    # A rank that makes no progress for longer is replaced.
    stuck_seconds: float = 120.0
    # Workers that may be lost within ten steps; the next loss fails the job.
    max_restarts: int = 5

    def __post_init__(self) -> None:
        require(0 < self.stuck_seconds < math.inf, "stuck_seconds must be above 0 and finite")
        require(self.max_restarts >= 0, "max_restarts must be 0 or more")
        require(self.asked is None or self.asked >= 1, "count must be at least 1")

    @property
    def asked(self) -> int | None:
        """Return the number of workers that the job asks for; None for all."""
        # unset, it isn't written: earlier versions' journals have digests of specs without it
        return None if self.count is msgspec.UNSET else self.count


class JobSpec(Section, frozen=True, kw_only=True):
    """Describe a job; every section is a mapping."""

    # Name of the job; a number is added to it.
    name: str = "job"
    # The model to train.
    policy: PolicySpec
    # Prompts.
    data: DataSpec
    # Scoring: one reward, or a list of them.
    reward: RewardSpec | tuple[RewardSpec, ...]
    # An environment that answers the policy; without one, an answer is one turn.
    environment: EnvironmentSpec | msgspec.UnsetType = msgspec.UNSET
    # The update.
    algorithm: AlgorithmSpec
    # Decoding.
    rollout: RolloutSpec = RolloutSpec()
    # Speculative decoding.
    speculation: SpeculationSpec = SpeculationSpec()
    # The drafter.
    drafter: DrafterSpec = DrafterSpec()
    # Workers.
    workers: WorkersSpec = WorkersSpec()
    # Services that get each step's figures: `tensorboard`, `wandb`, `trackio`, `opentelemetry`.
    loggers: tuple[str, ...] = ()
    # Seed of prompts' order and of sampling.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.drafter.train is msgspec.UNSET:
            # a stored spec says what it was, whatever later versions take for it
            msgspec.structs.force_setattr(self, "drafter", self._drafter_by_default)
        for place in unwritable_numbers(self):
            require(False, f"{place} must be a finite number below 2^63")
        require_distinct(self.rewards)
        for complaint in (
            complain_of_environment(self),
            complain_of_sources(self.reward, self.data),
            self.rollout.complain_of_staleness(self.algorithm.staleness),
        ):
            require(complaint is None, str(complaint))
        for logger in self.loggers:
            require(
                logger in LOGGERS, f"loggers: no logger '{logger}'; known: {', '.join(LOGGERS)}"
            )
        require(len(set(self.loggers)) == len(self.loggers), "loggers: one is named twice")
        require(0 <= self.seed < 2**63, "seed must lie in [0, 2^63)")
        require(
            self.name != "" and all(c.isalnum() or c in "-_." for c in self.name),
            "name may hold letters, digits, '-', '_' and '.' only",
        )
        require(
            not self.rollout.filtered or self.algorithm.allow_filtered_sampling,
            "training on samples drawn with top_k, top_p or min_p is biased; "
            "set algorithm.allow_filtered_sampling: true to do it all the same",
        )
        require(
            self.algorithm.eval_every == 0 or self.data.eval is not None,
            "algorithm.eval_every needs data.eval",
        )
        for name, held_out in self.data.evaluation_sets.items():
            drawn = held_out.temperature
            drawn = self.rollout.eval_temperature if drawn is None else drawn
            require(
                drawn > 0 or held_out.answers == 1,
                f"data.eval.{name}: at temperature 0 its {held_out.answers} answers would be equal",
            )
        complaint = self.complain_of_speculation()
        require(complaint is None or self.may_fall_back, str(complaint))
        require(
            not isinstance(self.speculation.strategy, Draft)
            or self.drafter.path is not None
            or self.drafter.train != "off",
            "speculation.strategy needs a drafter: set drafter.path, or drafter.train: auto",
        )
        require(
            self.algorithm.shards == 1 or (self.policy.lora is None and not self.policy.freeze),
            "policy.lora and policy.freeze need algorithm.shards: 1, a whole copy on each rank",
        )
        require(
            self.drafter.train == "off" or self.speculation.drafts,
            "drafter.train needs decoding with the drafter: set speculation.mode: adaptive",
        )

    def complain_of_speculation(self) -> str | None:
        """Say why the job can't speculate as it is to, as far as its spec tells; None if it can."""
        if self.speculation.mode == "off":
            return None
        ignored = next((key for key, value in self._min_ps() if value), None)
        if self.rollout.engine == "sglang" and ignored is not None:
            return (
                f"{ignored} with speculation needs rollout.engine: native, SGLang would ignore it"
            )
        longest = self.speculation.longest
        room = min(self.rollout.max_new_tokens, self.policy.max_context or 2**62)
        if longest < room:
            return None
        return f"speculation guesses {longest} tokens at once, and an answer has room for {room}"

    @property
    def issued_answers(self) -> int:
        """Return the most answers of a step before dynamic sampling replaces any."""
        needed = self.algorithm.prompts_per_step
        return (needed + self.rollout.surplus(needed)) * self.algorithm.group_size

    @property
    def may_fall_back(self) -> bool:
        """Return True if it goes without speculation where it can't speculate."""
        return self.speculation.mode == "auto" and self.drafter.train != "always"

    def settle_speculation(self, complaint: str | None) -> "JobSpec":
        """Turn mode `auto` into `adaptive`, or into `off` if there is a complaint."""
        replace = msgspec.structs.replace
        if self.speculation.mode != "auto":
            return self
        if complaint is None:
            return replace(self, speculation=replace(self.speculation, mode="adaptive"))
        off = replace(self.speculation, mode="off")
        return replace(self, speculation=off, drafter=replace(self.drafter, train="off"))

    @property
    def _drafter_by_default(self) -> DrafterSpec:
        trains = self.speculation.drafts and self.algorithm.steps > 0
        return msgspec.structs.replace(self.drafter, train="auto" if trains else "off")

    @property
    def leaves_sizes_open(self) -> bool:
        rollout = self.rollout
        cache = rollout.cache_tokens if rollout.engine == "sglang" else 0
        return "auto" in (rollout.slots, cache, self.algorithm.microbatch_tokens)

    def _min_ps(self) -> Iterator[tuple[str, float | None]]:
        """Yield each key that may leave unlikely tokens out, with its value."""
        yield "rollout.min_p", self.rollout.min_p
        yield "rollout.eval_min_p", self.rollout.eval_min_p
        for name, held_out in self.data.evaluation_sets.items():
            yield f"data.eval.{name}.min_p", held_out.min_p

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what its author may not expect, by the names of the keys."""
        if not self.algorithm.clips_nothing:
            return ()
        asked = self.algorithm.preset or f"loss {self.algorithm.loss}"
        return (
            f"algorithm: {asked} never clips with minibatches: 1 and epochs: 1, because the ratio "
            "of probabilities is 1 in an update's first optimiser step",
        )

    @property
    def rewards(self) -> tuple[RewardSpec, ...]:
        return self.reward if isinstance(self.reward, tuple) else (self.reward,)


class RayCluster(Section, frozen=True, kw_only=True):
    """Describe the Ray cluster that a session has joined, and what it takes of it."""

    # Of its GCS.
    address: str
    hosts: int
    workers_per_host: int
    cpus_per_worker: int
    # What Ray prepares on each host before it starts an actor; as JSON.
    runtime_env: str = "{}"


class SessionSpec(Section, frozen=True, kw_only=True):
    """Describe what `tlt up` starts; every process of the session receives it."""

    name: str
    # Folder of the session's Redis, logs and journal.
    folder: str
    # Folder that holds one folder a job.
    runs: str
    # URL of the committed blobs of jobs that are submitted; None: they are in the runs' folders.
    blobs: str | None = None
    # Folder in shared memory; removed with the session.
    flight: str
    redis_url: str
    workers: int = 2
    # Devices, and so processes, of a worker.
    ranks_per_worker: int = 1
    # Kind of device that ranks compute on.
    device: Literal["cpu", "cuda"] = "cpu"
    # A worker without a heartbeat for this long is lost.
    lease_seconds: float = 15.0
    # Answers that each reward scores at once.
    reward_workers: int = 8
    # Time between two heartbeats.
    heartbeat_seconds: float = 0.5
    # None: it has started its own Ray, on this host.
    cluster: RayCluster | None = None

    def job_flight(self, job: JobId) -> Path:
        """Return the job's folder in shared memory, which is removed when the job ends."""
        return Path(self.flight) / job
