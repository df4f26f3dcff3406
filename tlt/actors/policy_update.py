"""A worker's part in updates of the policy: its ranks get their samples, and learn together."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tlt.actors.cancellation import IncarnationEnded
from tlt.actors.energy_meter import Meter, gpus, packages
from tlt.actors.rank_process import RankProcess
from tlt.ids import Incarnation, Member, PromptIndex, WorkerId
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import (
    CheckpointCommitted,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
)
from tlt.ranks.worker_channel import Train, Trained
from tlt.store.redis_connection import Connection, persistently
from tlt.store.redis_keys import Keys

_Told = CheckpointCommitted | PolicyPublished | PolicyUpdateFinished


class Updates:
    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        worker: WorkerId,
        incarnation: Incarnation,
        ranks: Sequence[RankProcess],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._worker = worker
        self._incarnation = incarnation
        self._ranks = ranks
        self._running: UpdatePolicy | None = None
        self._last: UpdatePolicy | None = None
        self._trained: list[Trained] = []
        self._meter: Meter | None = None

    @property
    def running(self) -> bool:
        return self._running is not None

    def open(self, devices: Sequence[str]) -> None:
        self._meter = Meter(packages(), gpus(sum(device != "cpu" for device in devices)))

    def is_new(self, command: UpdatePolicy) -> bool:
        """What is said twice is made once."""
        return command != self._last

    async def begin(self, command: UpdatePolicy) -> None:
        self._running = self._last = command
        self._trained = []
        rollouts = await persistently(lambda: self._fetch(command), asyncio.sleep)
        for index, rank in enumerate(self._ranks):
            samples = tuple(
                tuple(rollouts[ref.prompt, ref.member] for ref in share.ranks[index])
                for share in command.minibatches
            )
            rank.send(Train(learn=command, local_rank=index, samples=samples))

    def trained(self, frame: Trained) -> list[_Told] | None:
        """What is to be told, once all ranks are through. None where no such update runs."""
        learn = frame.learn
        if learn != self._running:
            return None
        self._trained.append(frame)
        if len(self._trained) < len(self._ranks):
            return []
        self._running = None
        origin: dict[str, Any] = {
            "job": learn.job,
            "epoch": learn.epoch,
            "step": learn.step,
            "attempt": learn.attempt,
        }
        told: list[_Told] = []
        for done in self._trained:
            if done.checkpoint is not None:
                told.append(CheckpointCommitted(**origin, checkpoint=done.checkpoint))
            if done.policy is not None:
                told.append(PolicyPublished(**origin, policy=done.policy, metrics=done.metrics))
        told.append(
            PolicyUpdateFinished(
                **origin,
                worker=self._worker,
                incarnation=self._incarnation,
                version=frame.version,
                seconds=max(done.seconds for done in self._trained),
                joules=None if self._meter is None else self._meter.read(),
            )
        )
        return told

    async def _fetch(
        self, command: UpdatePolicy
    ) -> dict[tuple[PromptIndex, Member], RolloutFinished]:
        wanted = [
            (ref.prompt, ref.member)
            for share in command.minibatches
            for rank in share.ranks
            for ref in rank
        ]
        if not wanted:
            return {}
        key = self._keys.rollouts(command.job, command.step)
        fields = [f"{prompt}.{member}" for prompt, member in wanted]
        stored = await self._connection.hmget(key, fields)
        decoder = msgspec.msgpack.Decoder(RolloutFinished)
        found: dict[tuple[PromptIndex, Member], RolloutFinished] = {}
        for where, raw in zip(wanted, stored, strict=True):
            if raw is None:
                raise IncarnationEnded(
                    f"the rollout {where} of {command.job}, step {command.step}, is gone"
                )
            found[where] = decoder.decode(raw)
        return found
