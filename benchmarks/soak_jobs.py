"""Jobs of many shapes that come and go: the queue is never empty, one in twelve is cancelled."""

import contextlib
import time
from pathlib import Path
from random import Random

from cli.config import load_job
from tlt.base.id_types import JobId
from tlt.errors import StoreError
from tlt.protocol.shared_values import JobRecord
from tlt.session.client import with_client
from tlt.store.job_requests import ENDED_STATUSES

_ROOT = Path(__file__).resolve().parent.parent
SPEC = _ROOT / "configs" / "tiny-reasoner.yaml"
_REWARD = _ROOT / "benchmarks" / "soak_reward.py"
_AHEAD = 2
# of a job's life, after which it is cancelled
_CANCEL_SECONDS = (2.0, 12.0)
_EVERY = 12
_COMMON = (
    "data.eval_limit=8",
    "algorithm.eval_every=2",
    "algorithm.checkpoint_every=2",
    # deaths of its worker end no job here
    "rollout.max_tries=10",
)
# by turns; with the drawn sizes below no two jobs are equal
_SHAPES = (
    ("drafter.train=always", "algorithm.minibatches=2"),
    ("drafter.train=auto", "drafter.path=null"),
    ("drafter.train=always", "reward.kind=function", f"reward.function={_REWARD}:right"),
    ("speculation.depths=[]", "drafter.train=off", "algorithm.keep_best=false"),
)


class Jobs:
    """The jobs of a soak, in the order of their submission."""

    def __init__(self, random: Random) -> None:
        self.records: dict[JobId, JobRecord] = {}
        self._random = random
        # seconds that a job may run before it is cancelled, and when that is
        self._allowed: dict[JobId, float] = {}
        self._due: dict[JobId, float] = {}

    @property
    def ended(self) -> int:
        return sum(record.status in ENDED_STATUSES for record in self.records.values())

    def with_status(self, *statuses: str) -> list[JobId]:
        return [job for job, record in self.records.items() if record.status in statuses]

    def tend(self, *, submit: bool) -> None:
        """Submit and cancel what is due; while Redis is away, do nothing."""
        with contextlib.suppress(StoreError):
            for record in with_client("default", lambda client: client.jobs.all()):
                self.records[record.job] = record
            while submit and len(self.records) - self.ended <= _AHEAD:
                self._submit()
            self._cancel_due()

    def cancel_all(self) -> None:
        for job in self.with_status("queued", "preparing", "running"):
            with_client("default", lambda client, job=job: client.jobs.cancel(job))

    def _submit(self) -> None:
        number = len(self.records)
        draw = self._random
        changes = [
            *_COMMON,
            *_SHAPES[number % len(_SHAPES)],
            f"seed={draw.randrange(1_000_000)}",
            f"algorithm.steps={draw.choice((1, 2))}",
            f"algorithm.prompts_per_step={draw.choice((2, 3, 4))}",
            f"algorithm.group_size={draw.choice((4, 6, 8))}",
            f"rollout.max_new_tokens={draw.choice((150, 250, 400))}",
            f"rollout.slots={draw.choice((8, 12, 16))}",
        ]
        loaded = load_job(SPEC, changes)
        record = with_client("default", lambda client: client.jobs.submit(loaded))
        self.records[record.job] = record
        # of each shape in turn; ranks are replaced if it is in an update
        if number % _EVERY == (number // _EVERY) % len(_SHAPES):
            self._allowed[record.job] = draw.uniform(*_CANCEL_SECONDS)

    def _cancel_due(self) -> None:
        now = time.monotonic()
        for job in self.with_status("running"):
            if job in self._allowed and now > self._due.setdefault(job, now + self._allowed[job]):
                with_client("default", lambda client, job=job: client.jobs.cancel(job))
                del self._allowed[job]


def failures(jobs: Jobs) -> list[str]:
    return [f"{job}: {jobs.records[job].error}" for job in jobs.with_status("failed")]
