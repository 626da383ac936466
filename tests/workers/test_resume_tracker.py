"""Token ids of a job that another process runs."""

from inferry.domain.jobs import ResumeMode, ResumePoint
from inferry.domain.values import replace
from inferry.workers.remote.resume_tracker import tracker_for
from support.engine_fixtures import a_job

EVENT = b'data: {"choices":[{"index":0,"text":"a","logprobs":{"tokens":["a"]},"finish_reason":null}]}\n\n'


def test_a_job_whose_events_have_their_ids_beside_them_resumes_after_the_last() -> None:
    job = replace(a_job("job", [1, 2]), resume=ResumeMode.CONTINUE)
    tracker = tracker_for(job, lambda model, stops: None)
    assert tracker is not None
    for token in (5, 6):
        assert tracker.add(EVENT, (token,)) == EVENT
    assert tracker.add(EVENT, ()) == EVENT, "text that was held back to the end"
    assert tracker.resume_point() == ResumePoint((1, 2), (5, 6))
