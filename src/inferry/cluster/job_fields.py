"""Jobs, errors, ends and resume points as fields of frames, and back."""

from inferry.cluster.frames import (
    Counts,
    ErrorFields,
    Failure,
    Finish,
    JobFields,
    PayloadFields,
    PooledFields,
    RateLimitFields,
    RepeatFields,
    ResumeFields,
    UsageFields,
)
from inferry.dispatch.gateway import RateLimitStatus
from inferry.domain import errors
from inferry.domain.errors import ContextLengthExceeded, GatewayError, InternalError
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, PooledInputs, RepeatPolicy, ResumePoint
from inferry.domain.routes import BatchKey
from inferry.domain.streams import Done, Failed, Usage
from inferry.domain.values import replace

_ERRORS: dict[str, type[GatewayError]] = {
    name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, GatewayError)
}


# -- jobs ------------------------------------------------------------------------------------------------------------


def job_to_fields(job: InferenceJob, now: float) -> JobFields:
    batch, footprint, repeat, trace = job.batch_key, job.footprint, job.repeat, job.trace
    return JobFields(
        job.job_id,
        job.tenant,
        job.key_id,
        job.run_id,
        job.step_id,
        job.parent_run,
        job.lane,
        replace(job.route, avoid=()) if job.route.avoid else job.route,
        (batch.task, batch.streaming, batch.group),
        (_to_counts(footprint.prompt), _to_counts(footprint.cached), _to_counts(footprint.output)),
        job.token_budget,
        job.prompt_hash,
        now - job.arrived_at,
        None if job.deadline is None else job.deadline - now,
        job.max_wait_s,
        _payload_to_fields(job.payload),
        job.request_id,
        job.salted,
        job.session,
        job.template_id,
        job.prefix,
        job.output_hint,
        job.stream,
        job.resume,
        job.attempt,
        None if job.resume_point is None else resume_to_fields(job.resume_point),
        job.preemptions,
        job.unreachable_attempts,
        None if repeat is None else RepeatFields(repeat.name, repeat.keep, repeat.fresh, repeat.linger_s),
        None if trace is None else _to_header_dict(trace.headers(job.attempt)),
        job.max_kv_tokens,
        job.ttft_allowance_s,
        job.composed,
        job.features,
        job.run_kv_quota,
        job.is_batch,
    )


def fields_to_job(fields: JobFields, now: float) -> InferenceJob:
    """The job on this process's clock. Its trace is left to the receiver."""
    route, repeat = fields.route, fields.repeat
    task, streaming, group = fields.batch
    prompt, cached, output = fields.footprint
    return InferenceJob(
        job_id=fields.job_id,
        tenant=fields.tenant,
        run_id=fields.run_id,
        step_id=fields.step_id,
        lane=fields.lane,
        route=route,
        batch_key=BatchKey(route, task, streaming, group),
        footprint=Footprint(Estimate(*prompt), Estimate(*cached), Estimate(*output)),
        token_budget=fields.token_budget,
        prompt_hash=fields.prompt_hash,
        arrived_at=now - fields.age_s,
        max_wait_s=fields.max_wait_s,
        payload=_fields_to_payload(fields.payload),
        request_id=fields.request_id,
        key_id=fields.key_id,
        salted=fields.salted,
        parent_run=fields.parent_run,
        session=fields.session,
        template_id=fields.template_id,
        prefix=fields.prefix,
        output_hint=fields.output_hint,
        deadline=None if fields.deadline_in_s is None else now + fields.deadline_in_s,
        stream=fields.stream,
        resume=fields.resume,
        attempt=fields.attempt,
        resume_point=None if fields.resume_point is None else fields_to_resume(fields.resume_point),
        preemptions=fields.preemptions,
        unreachable_attempts=fields.unreachable_attempts,
        repeat=None if repeat is None else RepeatPolicy(repeat.name, repeat.keep, repeat.fresh, repeat.linger_s),
        max_kv_tokens=fields.max_kv_tokens,
        ttft_allowance_s=fields.ttft_allowance_s,
        composed=fields.composed,
        features=fields.features,
        run_kv_quota=fields.run_kv_quota,
        is_batch=fields.is_batch,
    )


def _payload_to_fields(payload: Payload) -> PayloadFields:
    pooled = payload.pooled
    return PayloadFields(
        payload.api,
        payload.body,
        payload.sampling,
        payload.prompt_ids,
        payload.include_usage,
        payload.output_limit,
        payload.stream_fields,
        payload.output_cap,
        payload.choices,
        payload.service_tier,
        payload.context_tokens,
        payload.non_streaming,
        payload.echo,
        payload.media_bytes,
        None if pooled is None else PooledFields(pooled.count, pooled.ids, pooled.pairs, pooled.dimensions),
        payload.cache_salt,
    )


def _fields_to_payload(fields: PayloadFields) -> Payload:
    pooled = fields.pooled
    return Payload(
        api=fields.api,
        body=fields.body,
        sampling=fields.sampling,
        prompt_ids=fields.prompt_ids,
        include_usage=fields.include_usage,
        output_limit=fields.output_limit,
        stream_fields=fields.stream_fields,
        output_cap=fields.output_cap,
        choices=fields.choices,
        service_tier=fields.service_tier,
        context_tokens=fields.context_tokens,
        non_streaming=fields.non_streaming,
        echo=fields.echo,
        media_bytes=fields.media_bytes,
        pooled=None if pooled is None else PooledInputs(pooled.count, pooled.ids, pooled.pairs, pooled.dimensions),
        cache_salt=fields.cache_salt,
        keeps_ids=True,
    )


def _to_counts(estimate: Estimate) -> Counts:
    return estimate.low, estimate.expected, estimate.high


def _to_header_dict(lines: bytes) -> dict[bytes, bytes]:
    pairs = [line.partition(b": ") for line in lines.split(b"\r\n") if line]
    return {name: value for name, _, value in pairs}


# -- ends ------------------------------------------------------------------------------------------------------------


def resume_to_fields(point: ResumePoint) -> ResumeFields:
    return ResumeFields(point.prompt_ids, point.output_ids, point.unsent, point.tail, point.cached_tokens)


def fields_to_resume(fields: ResumeFields) -> ResumePoint:
    return ResumePoint(fields.prompt_ids, fields.output_ids, fields.unsent, fields.tail, fields.cached_tokens)


def usage_to_fields(usage: Usage) -> UsageFields:
    return UsageFields(usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.gpu_seconds)


def done_to_message(key: int, end: Done, *, is_streamed: bool) -> Finish:
    return Finish(
        key,
        end.finish,
        usage_to_fields(end.usage),
        end.raw,
        None if end.stopped is None else error_to_fields(end.stopped),
        end.stopped_by_engine,
        end.stop_reason,
        None if is_streamed else end.shape,
    )


def failed_to_message(key: int, end: Failed, rate_limits: RateLimitFields | None) -> Failure:
    point = end.resume_point
    return Failure(
        key,
        error_to_fields(end.error),
        usage_to_fields(end.usage),
        None if point is None else resume_to_fields(point),
        rate_limits,
    )


def limits_to_fields(status: RateLimitStatus) -> RateLimitFields:
    return RateLimitFields(
        status.request_limit,
        status.requests_left,
        status.request_reset_s,
        status.token_limit,
        status.tokens_left,
        status.token_reset_s,
    )


def error_to_fields(error: GatewayError) -> ErrorFields:
    tokens = (
        (error.prompt_tokens, error.output_tokens, error.context_tokens)
        if isinstance(error, ContextLengthExceeded)
        else None
    )
    return ErrorFields(
        type(error).__name__,
        error.message,
        error.param,
        error.retry_after_s,
        error.predicted_wait_s,
        error.has_own_retry_time,
        tokens,
    )


def fields_to_error(fields: ErrorFields) -> GatewayError:
    """The error, as the end of its job: the process that reports it has retried what it could."""
    found = _ERRORS.get(fields.name, InternalError)
    error = found(fields.message, param=fields.param, retry_after_s=fields.retry_after_s)
    error.predicted_wait_s = fields.predicted_wait_s
    error.has_own_retry_time = fields.has_own_retry_time
    error.can_failover = False
    if isinstance(error, ContextLengthExceeded) and fields.tokens is not None:
        error.prompt_tokens, error.output_tokens, error.context_tokens = fields.tokens
    return error
