"""Callbacks in virtual time: retried with backoff for a bounded time, delivered by a 2xx alone, logged."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise

import msgspec
import pytest

from durable.async_work import URL, Stores, a_job_with_callback, stores, until
from inferry.domain.async_jobs import AsyncJob, Delivery, JobEnd
from inferry.durable.callback_client import CallbackFailed
from inferry.durable.callback_policy import CallbackPolicy
from inferry.durable.callback_signature import sign
from inferry.durable.callbacks import MAX_IN_FLIGHT_PER_TENANT, CallbackDeliverer
from support.virtual_time import LoopClock, run_virtual

POLICY = CallbackPolicy(initial_backoff_s=4.0, max_backoff_s=600.0, retry_for_s=3600.0)


class Receiver:
    """Gives the answers of a script: a status, or an error. `hangs` says for which jobs it never answers."""

    def __init__(self, *answers: int | str, hangs: Callable[[str], bool] = lambda _: False) -> None:
        self._answers = list(answers)
        self._hangs = hangs
        self.requests: list[tuple[float, Mapping[str, str], bytes]] = []
        self.in_flight = 0

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        assert url == URL
        self.requests.append((asyncio.get_running_loop().time(), headers, body))
        self.in_flight += 1
        try:
            await asyncio.sleep(0.25)
            if self._hangs(headers["webhook-id"]):
                await asyncio.sleep(100_000)
        finally:
            self.in_flight -= 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, str):
            raise CallbackFailed(answer)
        return answer


def a_deliverer(found: Stores, receiver: Receiver, jitter: float = 1.0) -> CallbackDeliverer:
    return CallbackDeliverer(
        found.jobs, found.secrets, found.executor, receiver, POLICY, LoopClock(), random=lambda: jitter
    )


def end_job(found: Stores, job: AsyncJob, at: float = 1000.0) -> None:
    found.jobs.create(job, b"{}", None, None)
    found.jobs.end(JobEnd(id=job.id, status="completed", at=at, expires_at=None, answer_status=200, answer=b'{"x":1}'))


def deliver(receiver: Receiver, *, jitter: float = 1.0, secrets: int = 1) -> tuple[AsyncJob, list[Delivery], Stores]:
    """One callback until it is delivered or given up: the job and its delivery log."""

    async def run() -> tuple[AsyncJob, list[Delivery], Stores]:
        async with stores() as found:
            for _ in range(secrets):
                found.secrets.rotate("t", 900.0, 1e6)
            end_job(found, a_job_with_callback())
            deliverer = a_deliverer(found, receiver, jitter)
            deliverer.start()

            def is_over() -> bool:
                job = found.jobs.get("t", "job_1", 0.0)
                return job is not None and job.callback in ("delivered", "failed")

            await until(is_over)
            await asyncio.sleep(10_000)
            await deliverer.close()
            job = found.jobs.get("t", "job_1", 0.0)
            assert job is not None
            check_signatures(found, receiver)
            assert deliverer.attempts.total() == job.callback_attempts
            assert deliverer.attempts[job.callback or ""] == 1
            return job, found.jobs.deliveries("job_1"), found

    return run_virtual(run())


def check_signatures(found: Stores, receiver: Receiver) -> None:
    keys = [secret.key for secret in found.secrets.valid("t", 1000.0)]
    for _, headers, body in receiver.requests:
        id, timestamp = headers["webhook-id"], int(headers["webhook-timestamp"])
        assert headers["webhook-signature"].split() == [sign(key, id, timestamp, body) for key in keys]


def test_a_callback_has_the_job_and_its_answer_and_is_sent_once() -> None:
    receiver = Receiver(204)
    job, log, _ = deliver(receiver, secrets=2)
    assert (job.callback, job.callback_attempts) == ("delivered", 1)
    assert job.callback_at == pytest.approx(1000.25, abs=0.1)
    (at, headers, body), *rest = receiver.requests
    assert rest == []
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == ("job_1", str(int(at)))
    event = msgspec.json.decode(body)
    assert (event["type"], event["timestamp"]) == ("job.completed", "1970-01-01T00:16:40Z")
    assert event["data"]["response"]["body"] == {"x": 1}
    assert "callback" not in event["data"]
    assert log == [Delivery(number=1, at=log[0].at, status=204, error=None, latency_ms=log[0].latency_ms)]
    assert 250 <= log[0].latency_ms < 1000


def test_everything_but_a_2xx_is_repeated_with_doubled_delays_and_the_same_body() -> None:
    receiver = Receiver(500, 307, "timeout", 404, "forbidden", 200)
    job, log, _ = deliver(receiver)
    assert (job.callback, job.callback_attempts) == ("delivered", 6)
    assert [(one.status, one.error) for one in log] == [
        *((500, None), (307, None), (None, "timeout"), (404, None), (None, "forbidden"), (200, None)),
    ]
    times = [at for at, _, _ in receiver.requests]
    assert [later - time for time, later in pairwise(times)] == [
        pytest.approx(delay, abs=0.5) for delay in (4.25, 8.25, 16.25, 32.25, 64.25)
    ]
    assert len({body for _, _, body in receiver.requests}) == 1
    assert len({headers["webhook-timestamp"] for _, headers, _ in receiver.requests}) == 6


def test_a_callback_is_given_up_after_the_time_for_retries() -> None:
    receiver = Receiver(503)
    job, log, _ = deliver(receiver)
    assert job.callback == "failed"
    assert job.callback_attempts == len(log) == len(receiver.requests)
    assert receiver.requests[-1][0] - 1000.0 <= POLICY.retry_for_s < 2 * POLICY.retry_for_s
    assert len(log) == 13


def test_jitter_shortens_delays_by_up_to_half() -> None:
    receiver = Receiver(500, 500, 200)
    deliver(receiver, jitter=0.0)
    times = [at for at, _, _ in receiver.requests]
    assert times[1] - times[0] == pytest.approx(2.25, abs=0.5)
    assert times[2] - times[1] == pytest.approx(4.25, abs=0.5)


def test_without_a_valid_secret_nothing_is_sent() -> None:
    receiver = Receiver(200)
    job, log, _ = deliver(receiver, secrets=0)
    assert (job.callback, receiver.requests) == ("failed", [])
    assert {one.error for one in log} == {"no_secret"}


def test_a_receiver_that_hangs_delays_its_own_tenant_only() -> None:
    async def run() -> None:
        receiver = Receiver(200, hangs=lambda id: id.startswith("slow"))
        async with stores() as found:
            for tenant in ("slow", "fast"):
                found.secrets.rotate(tenant, 900.0, 0.0)
            for n in range(200):
                end_job(found, a_job_with_callback(f"slow_{n}", tenant="slow"), at=990.0)
            for n in range(20):
                end_job(found, a_job_with_callback(f"fast_{n}", tenant="fast"), at=995.0)
            deliverer = a_deliverer(found, receiver)
            deliverer.start()
            await asyncio.sleep(30.0)
            fast = [found.jobs.get("fast", f"fast_{n}", 0.0) for n in range(20)]
            assert {job.callback for job in fast if job is not None} == {"delivered"}
            assert receiver.in_flight == MAX_IN_FLIGHT_PER_TENANT
            await deliverer.close()

    run_virtual(run())


def test_an_attempt_that_was_cut_off_is_repeated_after_a_restart() -> None:
    async def run() -> None:
        async with stores() as found:
            found.secrets.rotate("t", 900.0, 0.0)
            end_job(found, a_job_with_callback())
            hanging = Receiver(200, hangs=lambda _: True)
            first = a_deliverer(found, hanging)
            first.start()
            await asyncio.sleep(5.0)
            await first.close()
            assert len(hanging.requests) == 1
            assert found.jobs.deliveries("job_1") == []
            receiver = Receiver(200)
            second = a_deliverer(found, receiver)
            second.start()
            await asyncio.sleep(5.0)
            await second.close()
            assert [one.number for one in found.jobs.deliveries("job_1")] == [1]
            assert receiver.requests[0][2] == hanging.requests[0][2]

    run_virtual(run())


def test_a_job_that_ends_later_wakes_the_deliverer() -> None:
    async def run() -> None:
        receiver = Receiver(200)
        async with stores() as found:
            found.secrets.rotate("t", 900.0, 0.0)
            deliverer = a_deliverer(found, receiver)
            deliverer.start()
            keep_alive = asyncio.create_task(asyncio.sleep(1000))
            await asyncio.sleep(50.0)
            end_job(found, a_job_with_callback(), at=1050.0)
            deliverer.wake()
            await asyncio.sleep(2.0)
            assert len(receiver.requests) == 1
            keep_alive.cancel()
            await deliverer.close()

    run_virtual(run())
