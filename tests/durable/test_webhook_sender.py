"""Events for the operator's webhook, in virtual time: signed, in order, retried, from a bounded queue."""

import asyncio
from collections.abc import Mapping
from itertools import pairwise

import pytest

from inferry.durable.callback_client import CallbackFailed
from inferry.durable.callback_policy import CallbackPolicy
from inferry.durable.callback_signature import sign
from inferry.durable.webhook_sender import MAX_QUEUED, WebhookSender
from support.virtual_time import LoopClock, run_virtual

URL = "https://hooks.example/alerts"
KEY = b"k" * 32
POLICY = CallbackPolicy(initial_backoff_s=4.0, max_backoff_s=60.0, retry_for_s=600.0)


class Receiver:
    """Answers with a status or an error by the number of the request; the last one for all further requests."""

    def __init__(self, *answers: int | str) -> None:
        self._answers = answers
        self.requests: list[tuple[float, str, bytes]] = []

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        assert url == URL
        id, at = headers["webhook-id"], int(headers["webhook-timestamp"])
        assert headers["webhook-signature"] == sign(KEY, id, at, body)
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append((asyncio.get_running_loop().time(), id, body))
        await asyncio.sleep(0.1)
        if isinstance(answer, str):
            raise CallbackFailed(answer)
        return answer

    @property
    def ids(self) -> list[str]:
        return [id for _, id, _ in self.requests]


def deliver(receiver: Receiver, *ids: str) -> WebhookSender:
    async def run() -> WebhookSender:
        sender = WebhookSender(URL, KEY, receiver, POLICY, LoopClock(), lambda: 1.0)
        sender.start()
        for id in ids:
            sender.send(id, b"{}")
        await asyncio.sleep(10_000)
        await sender.close()
        return sender

    return run_virtual(run())


def test_an_event_is_signed_and_sent_once() -> None:
    receiver = Receiver(204)
    sender = deliver(receiver, "a")
    assert [(id, body) for _, id, body in receiver.requests] == [("a", b"{}")]
    assert sender.attempts == {"delivered": 1}


def test_everything_but_a_2xx_is_repeated_with_doubled_delays() -> None:
    receiver = Receiver(500, "timeout", 302, 200)
    sender = deliver(receiver, "a")
    times = [at for at, _, _ in receiver.requests]
    assert [later - time for time, later in pairwise(times)] == [pytest.approx(one, abs=0.2) for one in (4, 8, 16)]
    assert sender.attempts == {"retried": 3, "delivered": 1}


def test_events_arrive_in_order_although_the_first_is_retried() -> None:
    receiver = Receiver(500, 200)
    deliver(receiver, *"abc")
    assert receiver.ids == ["a", "a", "b", "c"]


def test_an_event_is_given_up_after_the_time_for_retries_and_the_next_is_sent() -> None:
    receiver = Receiver("forbidden")
    sender = deliver(receiver, *"ab")
    assert sender.attempts["failed"] == 2
    assert receiver.requests[-1][0] - receiver.requests[0][0] <= 2 * POLICY.retry_for_s
    assert set(receiver.ids) == {"a", "b"}


def test_the_queue_is_bounded_and_drops_the_oldest() -> None:
    receiver = Receiver(200)
    sender = deliver(receiver, *map(str, range(MAX_QUEUED + 3)))
    assert sender.attempts == {"dropped": 3, "delivered": MAX_QUEUED}
    assert receiver.ids == [str(n) for n in range(3, MAX_QUEUED + 3)]
