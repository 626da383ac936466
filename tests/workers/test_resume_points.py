"""Resume points: detokenising with a server that answers late, or not at all."""

import asyncio
from typing import Any

import msgspec
import pytest

from inferry.domain.errors import WorkerLost
from inferry.workers.openai_http.resume_points import ATTEMPTS, ResumePoints

pytestmark = pytest.mark.plain

TEXT = 200, msgspec.json.encode({"prompt": "text"})


class Server:
    """Answers each request with the next of `answers`; None: no answer in time."""

    def __init__(self, *answers: tuple[int, bytes] | None) -> None:
        self._answers = list(answers)

    async def post(self, path: bytes, headers: bytes, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        answer = self._answers.pop(0)
        if answer is None:
            raise WorkerLost("the server cannot be reached: TimeoutError")
        return answer

    @property
    def unanswered(self) -> int:
        return len(self._answers)


def text_tail(server: Any) -> str | None:
    points = ResumePoints(server, b"/detokenize", b"")
    return asyncio.run(points.text_tail("m", (), (1, 2, 3), 1))


@pytest.mark.parametrize("late", range(ATTEMPTS))
def test_a_server_that_does_not_answer_in_time_is_asked_again(late: int) -> None:
    server = Server(*[None] * late, (200, msgspec.json.encode({"prompt": "a longer text"})))
    assert text_tail(server) == "t"
    assert not server.unanswered


def test_a_server_that_never_answers_is_asked_a_bounded_number_of_times() -> None:
    server = Server(*[None] * ATTEMPTS, TEXT)
    assert text_tail(server) is None
    assert server.unanswered == 1


@pytest.mark.parametrize("answer", [(404, b"{}"), (200, b"no JSON")])
def test_a_server_that_does_not_detokenize_is_not_asked_again(answer: tuple[int, bytes]) -> None:
    server = Server(answer, TEXT)
    assert text_tail(server) is None
    assert server.unanswered == 1
