"""Every key that a session uses, all under one prefix, so that sessions can share a Redis."""

import msgspec

from tlt.ids import Incarnation, JobId, Step, WorkerId

COORDINATOR = "coordinator"
REWARD = "reward"
ROLLOUT = "rollout"


class Keys(msgspec.Struct, frozen=True):
    session: str

    def _key(self, *parts: object) -> str:
        return ":".join(("tlt", self.session, *map(str, parts)))

    @property
    def pattern(self) -> str:
        return self._key("*")

    @property
    def epoch(self) -> str:
        return self._key("epoch")

    @property
    def incarnations(self) -> str:
        return self._key("incarnations")

    @property
    def job_numbers(self) -> str:
        return self._key("job-numbers")

    @property
    def jobs(self) -> str:
        return self._key("jobs")

    @property
    def committed(self) -> str:
        """How far each journal reaches: what lies beyond was never decided."""
        return self._key("committed")

    @property
    def fence(self) -> str:
        """By worker: incarnations below this number have no say any more."""
        return self._key("fence")

    @property
    def heartbeats(self) -> str:
        return self._key("heartbeats")

    @property
    def events(self) -> str:
        return self._key("events")

    @property
    def dead_letters(self) -> str:
        return self._key("dead-letters")

    def commands(self, worker: WorkerId, incarnation: Incarnation) -> str:
        return self._key("commands", worker, incarnation)

    def prompts(self, job: JobId) -> str:
        return self._key("prompts", job)

    def growing(self, job: JobId) -> str:
        """Answers that are being written: read by who likes, kept for a moment."""
        return self._key("growing", job)

    def rollouts(self, job: JobId, step: Step) -> str:
        return self._key("rollouts", job, step)

    def of_job(self, job: JobId) -> tuple[str, ...]:
        """Patterns of what is gone when a job ends."""
        prompts, growing = self.prompts(job), self.growing(job)
        return prompts, growing, self._key("rollouts", job, "*")
