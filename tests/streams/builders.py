"""Streams and deltas for tests."""

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Delta, Done, FinishReason, Usage
from inferry.streams.mailbox import JobStream, MergeCounter
from support.builders import a_job

DONE = Done("j", FinishReason.STOP, Usage(3, 0, 2))


def a_stream(merge_counter: MergeCounter | None = None) -> JobStream:
    job = a_job("j", run_id="run", step_id="step")
    return JobStream(Attempt(job), MergeCounter() if merge_counter is None else merge_counter)


def a_delta(
    index: int, text: str = "", *, job_id: str = "j", run_id: str = "run", step_id: str = "step", raw: bytes = b""
) -> Delta:
    return Delta(job_id, run_id, step_id, index, text, (index,), 1, raw)
