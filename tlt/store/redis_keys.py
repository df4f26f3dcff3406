"""All keys of a session lie under one prefix, so that sessions can share a Redis."""

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
        """Hash of the position up to which each journal is committed."""
        return self._key("committed")

    @property
    def fence(self) -> str:
        """Hash by worker of the lowest incarnation that may write."""
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
        """Stream of answers that are still growing; entries are kept for a moment."""
        return self._key("growing", job)

    def rollouts(self, job: JobId, step: Step) -> str:
        return self._key("rollouts", job, step)

    def of_job(self, job: JobId) -> tuple[str, ...]:
        """Return the patterns of keys that are deleted when the job ends."""
        prompts, growing = self.prompts(job), self.growing(job)
        return prompts, growing, self._key("rollouts", job, "*")
