"""The spec's section about environments; the comment above a field describes it in docs/spec.md."""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from tlt.spec.data_and_algorithm import TASKSET, AlgorithmSpec, DataSpec
from tlt.spec.reward import RewardSpec
from tlt.spec.rollout import RolloutSpec
from tlt.spec.section import Section, require


class EnvironmentSpec(Section, frozen=True, kw_only=True):
    """Let an environment of yours answer the policy, so that an answer has several turns."""

    # `class` answers the policy's turns. `agent` is a program that asks for them itself, at an
    # address of OpenAI's protocol. `verifiers` runs a taskset of the package verifiers.
    kind: Literal["class", "agent", "verifiers"] = "class"
    # What makes an environment, as `package.module:name` or `file.py:name`: its class, or a
    # function without parameters. Of kind `agent`: a function that gets a row and a seed.
    factory: str | None = None
    # Instead of a function: the agent's program and its arguments. It reads the row, as JSON, from
    # its standard input.
    command: tuple[str, ...] = ()
    # Of kind `verifiers`: a taskset's id, or its configuration with the key `id`.
    taskset: str | dict[str, Any] | None = None
    # Of kind `verifiers`: the interpreter that has verifiers and the taskset.
    python: str | None = None
    # Of kind `verifiers`: the rest of the environment's configuration, as verifiers names it, such
    # as `{agent: {harness: {id: "null"}, runtime: {type: subprocess}}}`.
    env: dict[str, Any] = msgspec.field(default_factory=dict)
    # Most turns of the policy in an answer.
    max_turns: int = 16
    # Most answers that a worker has begun and not ended; each has a process, but for verifiers.
    most_open: int = 256
    # An environment that takes longer over a message has failed, and so has an agent that neither
    # asks for a turn nor ends for so long. Answers whose environment fails are left out, or get
    # `on_error` of the reward of kind `environment`.
    timeout_seconds: float = 60.0
    # Memory of an environment's process; what asks for more gets a MemoryError. All answers of a
    # worker share a process of kind `verifiers`.
    memory_gb: float = 2.0
    # Let it use the network.
    network: bool = False
    # `required` refuses it where the host lacks namespaces or Landlock; `available` runs it with
    # the limits that the host has.
    isolation: Literal["required", "available"] = "required"
    # Folders that it may write to beside its own.
    writable: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.factory or self.verifiers_taskset.get("id") or " ".join(self.command)

    @property
    def is_agent(self) -> bool:
        """Return True if it asks for turns itself."""
        return self.kind != "class"

    @property
    def verifiers_taskset(self) -> dict[str, Any]:
        return {"id": self.taskset} if isinstance(self.taskset, str) else self.taskset or {}

    def __post_init__(self) -> None:
        given = (self.factory is not None) + bool(self.command)
        match self.kind:
            case "class":
                require(self.factory is not None, "kind class needs a factory")
                require(not self.command, "command needs kind: agent")
            case "agent":
                require(given == 1, "kind agent needs either a factory or a command")
            case "verifiers":
                require(not given, "kind verifiers has neither a factory nor a command")
                require(self.python is not None, "kind verifiers needs python, its interpreter")
                named = isinstance(self.verifiers_taskset.get("id"), str)
                require(named, "kind verifiers needs a taskset, by its id")
        if self.kind != "verifiers":
            unused = self.taskset is None and self.python is None and not self.env
            require(unused, "taskset, python and env need kind: verifiers")
        require(self.max_turns >= 1, "max_turns must be at least 1")
        require(self.most_open >= 1, "most_open must be at least 1")
        require(0 < self.timeout_seconds < math.inf, "timeout_seconds must be above 0 and finite")
        require(0 < self.memory_gb < math.inf, "memory_gb must be above 0 and finite")


class _Sections(Protocol):
    """The sections of a spec that an environment must fit."""

    @property
    def environment(self) -> EnvironmentSpec | msgspec.UnsetType: ...
    @property
    def rewards(self) -> Sequence[RewardSpec]: ...
    @property
    def rollout(self) -> RolloutSpec: ...
    @property
    def algorithm(self) -> AlgorithmSpec: ...
    @property
    def data(self) -> DataSpec: ...


def complain_of_environment(spec: _Sections) -> str | None:
    """Check it against other sections; return a complaint, or None."""
    environment, algorithm = spec.environment, spec.algorithm
    sources = (*spec.data.sources, *spec.data.evaluation_sets.values())
    others = [source.path for source in sources if not source.path.startswith(TASKSET)]
    judged = any(reward.kind == "environment" for reward in spec.rewards)
    if judged and not environment:
        return "reward.kind environment needs an environment: set environment.factory"
    if environment and environment.kind == "verifiers" and others:
        return f"environment.kind verifiers plays tasks: write {TASKSET} instead of {others[0]}"
    if (not environment or environment.kind != "verifiers") and len(others) < len(sources):
        return f"data: {TASKSET} needs environment.kind verifiers"
    if environment and (spec.rollout.partial or algorithm.staleness):
        key = "rollout.partial" if spec.rollout.partial else "algorithm.staleness"
        return f"{key} must be 0: an environment can't go on with a part of an answer"
    compares = algorithm.penalises_rewards and algorithm.advantage != "batch"
    if environment and environment.is_agent and compares:
        # the update compares conversations, of which an answer may have several
        return "algorithm.kl_in: reward needs advantage: batch where agents answer; use kl_in: loss"
    return None
