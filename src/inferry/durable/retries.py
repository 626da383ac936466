"""Stored calls until they have an answer that counts: refusals wait, failures are tried again, errors are final."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from inferry.domain.errors import InternalError
from inferry.domain.storage import try_id
from inferry.durable.execute import CallAnswer, Execute, StoredCall

MAX_FAILURES = 5
"""Tries of a call whose worker was lost or did not respond. The request itself may be the reason."""
MIN_DELAY_S, MAX_DELAY_S = 0.1, 30.0

_FAILED = frozenset({500, 502, 504})
_REFUSED = frozenset({429, 503, 529})


def is_refusal(answer: CallAnswer) -> bool:
    """Whether the call was not admitted now and may be later: queue full, rate limit, no worker, draining."""
    return answer.status in _REFUSED and answer.retry_after_s is not None


def retry_delay_s(answer: CallAnswer, failures: int) -> float | None:
    """Seconds until the next try; None where the answer is final. `failures` counts tries that failed, this included.

    A refusal is retried without limit: only the deadline of the work ends it.
    """
    if is_refusal(answer):
        assert answer.retry_after_s is not None
        return min(max(answer.retry_after_s, MIN_DELAY_S), MAX_DELAY_S)
    if answer.status in _FAILED and failures < MAX_FAILURES:
        return min(MIN_DELAY_S * 4.0**failures, MAX_DELAY_S)
    return None


async def call_once(execute: Execute, call: StoredCall, tries: int) -> CallAnswer:
    """The answer to one try of a call. `call.job_id` names the work; each try is a job of its own."""
    try:
        return await execute.call(msgspec.structs.replace(call, job_id=try_id(call.job_id, tries)))
    except ConnectionAbortedError:
        return CallAnswer(status=InternalError.status, body=b"", code=InternalError.code)


async def call_until_final(
    execute: Execute,
    call: StoredCall,
    tries: int,
    record_try: Callable[[int], Awaitable[None]],
    *,
    is_charged: bool = False,
) -> CallAnswer:
    """The final answer to a call, with tries numbered from `tries`.

    `record_try` stores the number before the next try begins. A process that is killed repeats the try under the same
    job id, so that the ledger charges it once. Where the ledger has charged it already (`is_charged`), every further
    try has that job id.
    """
    failures = 0
    while True:
        answer = await call_once(execute, call, tries)
        failures += answer.status in _FAILED
        delay_s = retry_delay_s(answer, failures)
        if delay_s is None:
            return answer
        if not is_charged:
            tries += 1
            await record_try(tries)
        await asyncio.sleep(delay_s)
