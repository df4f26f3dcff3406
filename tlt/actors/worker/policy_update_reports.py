"""Collect what a worker's ranks report of a policy update, and report it once all are done."""

from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import CheckpointCommitted, PolicyPublished, PolicyUpdateFinished

UpdateEvent = CheckpointCommitted | PolicyPublished | PolicyUpdateFinished


class PolicyUpdate:
    """The policy update of a worker's ranks."""

    def __init__(self, setup: IncarnationSetup) -> None:
        self._setup = setup
        self._running: UpdatePolicy | None = None
        self._last: UpdatePolicy | None = None
        # ranks that have finished it
        self._finished = 0
        # events of the first rank, which are reported once all ranks have finished
        self._published: list[UpdateEvent] = []

    @property
    def running(self) -> bool:
        """Return True while the ranks compute the update."""
        return self._running is not None

    def is_repeated(self, command: UpdatePolicy) -> bool:
        """Return True if this command has been carried out already."""
        return command == self._last

    def begin(self, command: UpdatePolicy) -> None:
        """Have all ranks make the update."""
        self._running = self._last = command
        self._finished, self._published = 0, []
        self._setup.send(command)

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
        self._finished += 1
        if self._finished < len(self._setup.ranks):
            return []
        self._running = None
        return [*self._published, event]


def _update_of(message: UpdatePolicy | UpdateEvent) -> tuple[str, int, int, int]:
    return message.job, message.epoch, message.step, message.attempt
