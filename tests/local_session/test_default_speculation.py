"""A job that would speculate by default goes without where it can't, and says so once."""

import msgspec

from tests.local_session.session import LocalSession, changed
from tlt.spec.config import DrafterSpec, JobSpec, SpeculationSpec


async def test_the_log_says_why_a_job_does_not_speculate(
    session: LocalSession, spec: JobSpec
) -> None:
    by_default = msgspec.structs.replace(
        changed(spec, policy={"max_context": 64}, rollout={"max_new_tokens": 12}),
        speculation=SpeculationSpec(),
        drafter=DrafterSpec(),
    )
    job = await session.submit(by_default)
    await session.done(job)
    logs = (await session.tlt("logs", job)).stdout
    why = "no speculation: speculation guesses 12 tokens at once, and an answer has room for 12"
    assert logs.count(why) == 1
