"""Which answers to stored calls are final, and under which job ids they are tried again."""

import pytest

from inferry.durable.execute import CallAnswer, StoredCall
from inferry.durable.retries import MAX_DELAY_S, MAX_FAILURES, MIN_DELAY_S, call_until_final, retry_delay_s
from support.virtual_time import run_virtual

CALL = StoredCall(tenant="t", key_id=None, path="/v1/x", body=b"", job_id="item", run_id="r", step_id="s")


def an_answer(status: int, retry_after_s: float | None = None) -> CallAnswer:
    return CallAnswer(status=status, body=b"%d" % status, retry_after_s=retry_after_s)


@pytest.mark.parametrize("status", [200, 400, 401, 402, 403, 404, 408, 409, 413])
def test_answers_and_errors_of_the_request_are_final(status: int) -> None:
    assert retry_delay_s(an_answer(status, retry_after_s=1.0), 0) is None


@pytest.mark.parametrize("status", [429, 503, 529])
def test_a_refusal_is_retried_when_it_says_however_often_it_comes(status: int) -> None:
    assert retry_delay_s(an_answer(status, 2.0), 1000) == 2.0
    assert retry_delay_s(an_answer(status, 0.0), 0) == MIN_DELAY_S
    assert retry_delay_s(an_answer(status, 86_400.0), 0) == MAX_DELAY_S
    assert retry_delay_s(an_answer(status), 0) is None, "a limit of 0 never admits"


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_failure_is_retried_a_few_times(status: int) -> None:
    delays = [retry_delay_s(an_answer(status), failures) for failures in range(1, MAX_FAILURES + 1)]
    assert delays[-1] is None
    assert delays[:-1] == sorted(delay for delay in delays[:-1] if delay is not None)


class Scripted:
    def __init__(self, *answers: CallAnswer | Exception) -> None:
        self._answers = list(answers)
        self.job_ids: list[str] = []

    def paths(self) -> frozenset[str]:
        return frozenset()

    async def call(self, call: StoredCall) -> CallAnswer:
        self.job_ids.append(call.job_id)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_every_try_has_a_job_id_of_its_own_and_is_recorded_before_it_begins() -> None:
    execute = Scripted(an_answer(429, 1.0), ConnectionAbortedError(), an_answer(200))
    recorded: list[tuple[int, int]] = []

    async def record_try(tries: int) -> None:
        recorded.append((tries, len(execute.job_ids)))

    assert run_virtual(call_until_final(execute, CALL, 3, record_try)) == an_answer(200)
    assert execute.job_ids == ["item-3", "item-4", "item-5"]
    assert recorded == [(4, 1), (5, 2)]


def test_a_try_that_was_charged_keeps_its_job_id() -> None:
    execute = Scripted(an_answer(429, 1.0), an_answer(502), an_answer(200))

    async def record_try(tries: int) -> None:
        raise AssertionError("recorded")

    run_virtual(call_until_final(execute, CALL, 3, record_try, is_charged=True))
    assert execute.job_ids == ["item-3"] * 3
