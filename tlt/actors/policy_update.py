"""Run a worker's part of a policy update: give its ranks their samples, and collect events."""

from collections.abc import Sequence

import msgspec

from tlt.actors.energy_meter import EnergyMeter, gpu_counters, processor_counters
from tlt.actors.incarnation_shutdown import IncarnationEnded
from tlt.actors.worker_context import IncarnationSetup
from tlt.id_types import Member, PromptIndex
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import (
    CheckpointCommitted,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
)
from tlt.protocol.rank_messages import UpdateSamples
from tlt.store.redis_connection import retry_until_connected

UpdateEvent = CheckpointCommitted | PolicyPublished | PolicyUpdateFinished
_decoder = msgspec.msgpack.Decoder(RolloutFinished)


class PolicyUpdate:
    """The policy update of a worker's ranks."""

    def __init__(self, setup: IncarnationSetup) -> None:
        self._setup = setup
        self._running: UpdatePolicy | None = None
        self._last: UpdatePolicy | None = None
        self._finished: list[PolicyUpdateFinished] = []
        # events of the first rank, which are reported once all ranks have finished
        self._published: list[UpdateEvent] = []
        self._meter: EnergyMeter | None = None

    @property
    def running(self) -> bool:
        """Return True while the ranks compute the update."""
        return self._running is not None

    def open(self, devices: Sequence[str]) -> None:
        """Begin to measure energy."""
        self._meter = EnergyMeter(
            processor_counters(), gpu_counters(sum(device != "cpu" for device in devices))
        )

    def is_repeated(self, command: UpdatePolicy) -> bool:
        """Return True if this command has been carried out already."""
        return command == self._last

    async def begin(self, command: UpdatePolicy) -> None:
        """Send each rank its samples and the command."""
        self._running = self._last = command
        self._finished, self._published = [], []
        rollouts = await retry_until_connected(lambda: self._fetch(command))
        for index, rank in enumerate(self._setup.ranks):
            samples = tuple(
                tuple(rollouts[ref.prompt, ref.member] for ref in share.ranks[index])
                for share in command.minibatches
            )
            rank.send(UpdateSamples(job=command.job, minibatches=samples))
            rank.send(command)

    def collect(self, event: UpdateEvent) -> list[UpdateEvent] | None:
        """Return the worker's events once all of its ranks have finished.

        None: the event is about another update than the running one.
        """
        command = self._running
        if command is None or _update_of(event) != _update_of(command):
            return None
        if not isinstance(event, PolicyUpdateFinished):
            self._published.append(event)
            return []
        self._finished.append(event)
        if len(self._finished) < len(self._setup.ranks):
            return []
        self._running = None
        finished = msgspec.structs.replace(
            event,
            seconds=max(found.seconds for found in self._finished),
            joules=None if self._meter is None else self._meter.read(),
        )
        return [*self._published, finished]

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
        key = self._setup.keys.rollouts(command.job, command.step)
        fields = [f"{prompt}.{member}" for prompt, member in wanted]
        stored = await self._setup.connection.hmget(key, fields)
        found: dict[tuple[PromptIndex, Member], RolloutFinished] = {}
        for name, raw in zip(wanted, stored, strict=True):
            if raw is None:
                raise IncarnationEnded(
                    f"the rollout {name} of {command.job}, step {command.step}, is gone"
                )
            found[name] = _decoder.decode(raw)
        return found


def _update_of(message: UpdatePolicy | UpdateEvent) -> tuple[str, int, int, int]:
    return message.job, message.epoch, message.step, message.attempt
