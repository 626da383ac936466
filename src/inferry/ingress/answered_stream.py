"""The stream of a call whose whole answer is known already."""

import msgspec

from inferry.dispatch.gateway import JobStream, ended_stream
from inferry.domain.attempts import Attempt
from inferry.domain.jobs import InferenceJob
from inferry.domain.streams import Delta, Done
from inferry.domain.values import replace
from inferry.ingress.answer_events import answer_events, usage_event
from inferry.ingress.openai.request_schema import StreamOptions
from inferry.ingress.wire_format import ClientRequest
from inferry.pipelines.composed import Fields, StepAnswer


def answered_stream(step: StepAnswer, body: Fields, client: ClientRequest) -> tuple[JobStream, InferenceJob]:
    """The body as the answer to the client's request, streamed if that asks for it. `step` has generated it."""
    wire, job, end = client.wire, step.job, step.attempt.end
    assert isinstance(end, Done), "the step has succeeded"
    streams, options = wire.stream is True, wire.stream_options
    include_usage = isinstance(options, StreamOptions) and options.include_usage is True
    job = replace(job, stream=streams, resume_point=None, payload=replace(job.payload, include_usage=include_usage))
    attempt = Attempt(job)
    attempt.plan, attempt.sent_at, attempt.placed = step.attempt.plan, step.attempt.sent_at, step.attempt.placed
    raw = answer_events(body) if streams else msgspec.json.encode(body)
    stream = ended_stream(
        attempt,
        Delta(job.job_id, job.run_id, job.step_id, 0, tokens=1, raw=raw, is_last=True),
        Done(
            job.job_id,
            end.finish,
            end.usage,
            usage_event(body) if streams else b"",
            stopped=None if streams else end.stopped,  # the events have it
        ),
    )
    return stream, job
