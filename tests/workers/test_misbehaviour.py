"""Servers that misbehave: every job ends once, and no error looks like success."""

import asyncio
import gzip
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.jobs import ResumeMode
from inferry.domain.streams import Delta, Done, FinishReason, Item
from inferry.workers.openai_http.calls import Call
from inferry.workers.plan_completion import PlanCompletion
from support.http_jobs import a_call, a_plan, a_worker, done, error_of, failed, ran, raw_of, run
from support.token_server import TokenServer, written
from support.upstream import DONE, Upstream, begin, chunk, event, role, usage
from support.waiting import async_until
from workers.broken_servers import CHUNKED, GOOD, HEAD, PLAIN, Pieces, against, check_order, framed, says


def test_events_split_at_every_byte_are_put_together() -> None:
    whole = role() + chunk("é", "stop") + usage(3, 1) + DONE
    cut = 0

    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        # As two chunks: the parser hands them on separately.
        response = await begin(request)
        await response.write(whole[:cut])
        await response.write(whole[cut:])
        return response

    async def scenario() -> None:
        nonlocal cut
        async with Upstream(script) as up:
            worker = a_worker(up)
            await worker.start()
            for cut in range(1, len(whole)):  # noqa: B007
                items: list[Item] = []
                await worker.run(a_plan(a_call()), items.append)
                check_order(items)
                assert done(items).usage.prompt_tokens == 3
                assert raw_of(items) == role() + chunk("é", "stop")
            await worker.close()

    run(scenario())


def test_followed_events_split_at_every_byte_are_put_together() -> None:
    """The same without a network in between, ids and all."""

    async def scenario() -> None:
        server = TokenServer()
        prompt = [1, 2]
        pieces = [server._event(True, {"role": "assistant", "content": ""}, None, None, prompt, True)]
        pieces += [server._event(True, {"content": f" t{one}"}, None, [one], None, True) for one in written(prompt, 3)]
        whole = b"".join(pieces)
        worker = a_worker(Upstream())
        for line_end in (b"\n", b"\r\n"):
            stream = whole.replace(b"\n", line_end)
            for cut in range(1, len(stream)):
                items: list[Item] = []
                call = Call(a_call(), items.append, PlanCompletion(1), worker, trace_tokens=True)
                call.on_head(200)
                call.on_body(stream[:cut])
                call.on_body(stream[cut:])
                call.on_lost("cut")
                resume_point = failed(items).resume_point
                assert resume_point is not None
                assert (resume_point.prompt_ids, list(resume_point.output_ids)) == ((1, 2), written(prompt, 3))
                assert b"t" + str(resume_point.output_ids[-1]).encode() in raw_of(items)
                assert b'token_ids":[' not in raw_of(items)
        await worker.close()

    run(scenario())


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((chunk("a"), event({"error": {"message": "EngineCore died", "code": 500}}), DONE), "worker_lost"),
        ((chunk("a"), chunk("", "abort"), usage(1, 1), DONE), "worker_lost"),
        ((chunk("a"), b"data: {garbage\n\n", chunk("b", "stop"), DONE), "worker_lost"),
        ((chunk("a"), b"data: [1,2]\n\n", chunk("b", "stop"), DONE), "worker_lost"),
        ((chunk("a"), b"data: \xff\xfe\n\n", DONE), "worker_lost"),
        ((chunk("a"), DONE), "worker_lost"),
        ((DONE,), "worker_lost"),
        ((b"",), "worker_lost"),
        ((b"<html>welcome</html>",), "worker_lost"),
        ((chunk("a"), chunk("b", "stop")[:-10]), "worker_lost"),
    ],
    ids=["error", "abort", "garbage", "list", "bytes", "no-finish", "only-done", "nothing", "page", "cut"],
)
def test_an_inconsistent_end_is_a_failure(events: tuple[bytes, ...], code: str) -> None:
    for trace_tokens in (True, False):
        items = against(says(*events), **({} if trace_tokens else {"profile": PLAIN}))
        assert error_of(items).code == code
        assert b"abort" not in raw_of(items)
        assert b"error" not in raw_of(items)


@pytest.mark.parametrize(
    "events",
    [
        (chunk("a"), chunk("b", "stop")),
        (chunk("a"), chunk("b", "stop"), usage(1, 2)),
        (chunk("a"), chunk("b", "stop"), chunk("", "stop"), usage(1, 2), DONE),
        (chunk("a"), chunk("b", "stop"), chunk("late"), usage(1, 2), DONE),
        (chunk("a"), chunk("b", "stop"), DONE, chunk("after"), DONE),
        (b": hello\n\n", b"event: x\ndata: " + chunk("a")[6:], b"id: 3\n\n", chunk("b", "stop"), usage(1, 2), DONE),
    ],
    ids=["no-done", "no-done-usage", "twice", "late-token", "after-done", "other-fields"],
)
def test_a_sloppy_end_is_still_an_end(events: tuple[bytes, ...]) -> None:
    items = against(says(*events))
    assert done(items).finish is FinishReason.STOP
    assert b"after" not in raw_of(items)


def test_usage_that_is_missing_is_counted() -> None:
    assert done(against(says(chunk("a"), chunk("b"), chunk("c", "length"), DONE))).usage.output_tokens == 3


def test_a_huge_event_passes_and_an_endless_one_does_not() -> None:
    long = "x" * 3_000_000
    items = against(says(chunk(long), chunk("b", "stop"), usage(1, 2), DONE))
    done(items)
    assert len(raw_of(items)) > 3_000_000

    async def endless(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 1_000_000)

    assert error_of(against(endless)).code == "worker_lost"


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("header", "seconds"), [("4", 4.0), (None, None), ("nonsense", None)])
def test_a_full_server_is_retryable_with_its_retry_after(status: int, header: str | None, seconds: float) -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({}, status=status, headers={} if header is None else {"Retry-After": header})

    error = error_of(against(script))
    assert (error.code, error.can_failover, error.retry_after_s) == ("no_worker", True, seconds)


def test_a_body_in_an_unrequested_encoding_is_a_failure() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert "accept-encoding" not in request.headers
        return web.Response(body=gzip.compress(GOOD), headers={"content-encoding": "gzip"})

    assert error_of(against(script)).code == "worker_lost"


@pytest.mark.parametrize(
    ("pieces", "resets", "is_good"),
    [
        ((CHUNKED, framed(GOOD), b"0\r\n\r\n"), False, True),
        ((CHUNKED, framed(chunk("a")), b"ff\r\ndata: {"), False, False),
        ((CHUNKED, framed(chunk("a"))), True, False),
        ((CHUNKED,), True, False),
        ((), True, False),
        ((b"HTT",), True, False),
        ((HEAD + b"content-length: 5\r\n\r\n" + GOOD,), False, False),
        ((HEAD + b"content-length: 99999\r\n\r\n" + chunk("a"),), False, False),
        ((HEAD + b"content-length: -1\r\n\r\n" + GOOD,), False, False),
        ((HEAD + b"content-length: 10\r\ncontent-length: 20\r\n\r\n" + GOOD,), False, False),
        ((b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\nconnection: close\r\n\r\n" + GOOD,), False, True),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), False, False),
        ((b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",), False, False),
    ],
    ids=[
        *("good", "half-chunk", "reset-after-token", "reset-after-head", "reset-at-once", "half-head", "too-short"),
        *("too-long", "negative", "two-lengths", "long-header", "no-content", "elsewhere"),
    ],
)
def test_every_way_an_answer_can_be_broken(pieces: tuple[bytes, ...], resets: bool, is_good: bool) -> None:
    async def scenario() -> None:
        items = await Pieces(*pieces, resets=resets).items(first_token_timeout_s=5)
        assert isinstance(items[-1], Done) == is_good
        if not is_good:
            assert error_of(items).code == "worker_lost"

    run(scenario())


def test_one_finish_of_several_choices_is_not_the_end() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk("a", "stop"))
        await asyncio.sleep(0.01)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def scenario() -> None:
        async with Upstream(script) as up:
            assert error_of(await ran(up, a_call(n=2, resume=ResumeMode.RESTART))).code == "worker_lost"
            assert isinstance((await ran(up, a_call()))[-1], Done)

    run(scenario())


def test_nonsense_ends_a_stream_before_anything_that_looks_like_a_good_end() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(role() + chunk("a"))
        await asyncio.sleep(0.05)
        await response.write(b"data: {not json\n\n")
        await asyncio.sleep(0.05)
        await response.write(chunk("b", "stop") + b"data: [DONE]\n\n")
        return response

    items = against(script)
    assert error_of(items).code == "worker_lost"
    assert b"stop" not in b"".join(item.raw for item in items if isinstance(item, Delta))


def test_jobs_on_a_closed_worker_are_lost_and_not_cancelled() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.01)) as up:
            worker, items = a_worker(up), list[Item]()
            await worker.start()
            running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), items.append))
            await async_until(lambda: bool(items))
            await worker.close()
            await running
            assert error_of(items).code == "worker_lost"

    run(scenario())


def test_a_pooled_connection_that_closes_as_a_call_is_sent_fails_no_call() -> None:
    """The race of a server's keep-alive against a request, many times over."""

    async def scenario() -> None:
        connections = 0

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            try:
                for served in range(2):
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                    if served:
                        break  # read, and closed without a word
                    answer = b'{"data":[{"id":"m"}]}' if head.startswith(b"GET") else GOOD
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
            except asyncio.IncompleteReadError:
                pass
            writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        up = Upstream()
        up.port = server.sockets[0].getsockname()[1]
        worker = a_worker(up, profile=PLAIN)
        await worker.start()
        for number in range(10):
            items: list[Item] = []
            await worker.run(a_plan(a_call(f"j{number}")), items.append)
            done(items)
        assert connections >= 5
        await worker.close()
        server.close()
        await server.wait_closed()

    run(scenario())
