"""All keys of a session have one prefix, so that several sessions can share a Redis."""

from typing import Literal

from tlt.base.id_types import Incarnation, JobId, Purpose, Step, WorkerId

COORDINATOR = "coordinator"
REWARD = "reward"
ROLLOUT = "rollout"
# queues of a job's prompts, where workers may decode the next step's
_TWO_STEPS_QUEUES, _EVALUATION_QUEUE = 3, 2


class Keys:
    def __init__(self, session: str) -> None:
        self.session = session
        self.pattern = self._key("*")
        self.epoch = self._key("epoch")
        self.incarnations = self._key("incarnations")
        self.job_numbers = self._key("job-numbers")
        self.jobs = self._key("jobs")
        # hash by a user's idempotency key of the job that was submitted with it
        self.idempotency = self._key("idempotency")
        # hash of the position up to which each journal is committed
        self.committed = self._key("committed")
        # hash by worker of the lowest incarnation that may write
        self.fence = self._key("fence")
        self.heartbeats = self._key("heartbeats")
        self.services = self._key("service-heartbeats")
        self.events = self._key("events")
        self.dead_letters = self._key("dead-letters")

    def _key(self, *parts: object) -> str:
        return ":".join(("tlt", self.session, *map(str, parts)))

    def commands(self, worker: WorkerId, incarnation: Incarnation | Literal["*"]) -> str:
        return self._key("commands", worker, incarnation)

    def prompts(self, job: JobId, queue: int = 0) -> str:
        return self._key("prompts", job, queue) if queue else self._key("prompts", job)

    def partial_answers(self, job: JobId) -> str:
        """Name the stream of answers that are still being written; it keeps a few entries."""
        return self._key("partial_answers", job)

    def of_job(self, job: JobId) -> tuple[str, ...]:
        """Return the keys that are deleted when the job ends."""
        return *(self.prompts(job, queue) for queue in prompt_queues(1)), self.partial_answers(job)


def prompt_queues(staleness: int) -> range:
    """Return the numbers of the queues that a job's prompts are in."""
    return range(_TWO_STEPS_QUEUES if staleness else 1)


def queue_of(staleness: int, purpose: Purpose, step: Step) -> int:
    """Return the queue of a batch's prompts: neighbouring steps and evaluations have their own."""
    if not staleness:
        return 0
    return _EVALUATION_QUEUE if purpose == "eval" else step % 2
