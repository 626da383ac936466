"""Invalid UTF-8 from a server never reaches a client, and the job is resumed on another worker."""

from typing import Any

import pytest
from aiohttp import web

from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import ResumeMode, ResumePoint
from support.http_jobs import a_call, a_worker, done, error_of, failed, ran, raw_of, run
from support.token_server import TokenServer, is_half, written
from support.upstream import DONE, Script, Upstream, begin, chunk, role, usage

BAD = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\xaf"]
"""No character begins so; half of one; a surrogate; beyond the last character; a slash in disguise."""


def says(*pieces: bytes) -> Script:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return script


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "in the last event"])
def test_bytes_that_are_not_utf8_fail_the_attempt_and_reach_no_client(bad: bytes, last: bool) -> None:
    wrong = chunk("MARK", "stop" if last else None).replace(b"MARK", b"a" + bad + b"b")

    async def scenario() -> None:
        async with Upstream(says(role() + chunk("fine"), wrong, chunk("c", "stop") + usage(3, 2) + DONE)) as up:
            items = await ran(up, a_call(resume=ResumeMode.RESTART))
            assert isinstance(error_of(items), WorkerLost)
            assert error_of(items).can_failover
            assert "UTF-8" in error_of(items).message
            raw_of(items).decode()

    run(scenario())


def test_a_job_resumes_before_the_bytes_that_are_not_utf8() -> None:
    class Spoilt(TokenServer):
        @staticmethod
        def _event(*args: Any) -> bytes:
            found = TokenServer._event(*args)
            return found.replace(b" t", b" \xfe") if args[3] and args[3][0] == spoilt else found

    spoilt = next(token for token in written([5, 6, 7], 12)[4:] if not is_half(token))

    async def scenario() -> None:
        async with Upstream(Spoilt()) as up, Upstream(TokenServer()) as other:
            first = await ran(up, a_call(api="completions", tokens=12))
            resume_point = failed(first).resume_point
            assert resume_point is not None
            assert list(resume_point.output_ids) == written([5, 6, 7], len(resume_point.output_ids))
            assert spoilt not in resume_point.output_ids
            done(await ran(other, a_call(api="completions", tokens=12, resume_point=resume_point)))

    run(scenario())


def test_a_continuation_is_checked_too() -> None:
    wrong = chunk("MARK", chat=False).replace(b"MARK", b"\xff")

    async def scenario() -> None:
        async with Upstream(says(wrong, chunk("c", "stop", chat=False) + usage(3, 2) + DONE)) as up:
            items = await ran(up, a_call(resume_point=ResumePoint((1, 2), (3,))))
            assert "UTF-8" in error_of(items).message

    run(scenario())


def test_characters_that_come_in_pieces_are_whole() -> None:
    body = role() + chunk("né", None) + chunk("€😀", "stop") + usage(3, 2) + DONE
    body = body.replace(b"\\u00e9", "é".encode()).replace(b"\\u20ac\\ud83d\\ude00", "€😀".encode())
    assert not body.isascii()

    async def scenario() -> None:
        for cut in range(1, len(body), 7):
            async with Upstream(says(body[:cut], body[cut:])) as up:
                items = await ran(up, a_call(resume=ResumeMode.RESTART))
                done(items)
                assert "€😀".encode() in raw_of(items)

    run(scenario())


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_refusal_that_is_not_utf8_is_not_repeated_to_the_client(status: int) -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, body=b'{"error":{"message":"no \xff\xfe"}}')

    async def scenario() -> None:
        async with Upstream(script) as up:
            assert isinstance(error_of(await ran(up)), WorkerLost)

    run(scenario())


def test_a_list_of_models_that_is_not_utf8_is_none() -> None:
    class Garbled(Upstream):
        async def _models(self, request: web.Request) -> web.Response:
            return web.Response(body=b'{"data":[{"id":"\xff"}]}')

    async def scenario() -> None:
        async with Garbled() as up:
            with pytest.raises(WorkerLost):
                await a_worker(up).start()

    run(scenario())
