"""Finds a job's stream: items that a worker emits for a job reach that stream and no other."""

from inferry.domain.attempts import Attempt
from inferry.domain.streams import End
from inferry.streams.mailbox import JobStream, MergeCounter


class Demux:
    """The open streams, by job. Opened before the job is offered, closed by its end."""

    __slots__ = ("_streams", "merge_counter")

    def __init__(self) -> None:
        self._streams: dict[str, JobStream] = {}
        self.merge_counter = MergeCounter()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, attempt: Attempt) -> JobStream:
        job_id = attempt.job.job_id
        if job_id in self._streams:
            raise ValueError(f"{job_id} has a stream already")
        stream = self._streams[job_id] = JobStream(attempt, self.merge_counter)
        return stream

    def get(self, job_id: str) -> JobStream | None:
        """None for a job that has ended: late items are dropped."""
        return self._streams.get(job_id)

    def job_ids(self) -> list[str]:
        return list(self._streams)

    def streams(self) -> list[JobStream]:
        """The streams of all jobs that have not ended."""
        return list(self._streams.values())

    def close(self, stream: JobStream, end: End) -> None:
        del self._streams[end.job_id]
        stream.finish(end)
