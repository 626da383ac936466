"""Jobs that are interrupted on one server and resumed from token ids on another."""

import asyncio
import itertools
import json
from typing import Any, Literal

import pytest
from aiohttp import web

from inferry.domain.errors import ClientClosed
from inferry.domain.jobs import ResumeMode, ResumePoint
from inferry.domain.streams import Delta, FinishReason, Item
from inferry.workers.openai_http.profiles import TGI
from inferry.workers.openai_http.token_trace import ContinuationScanner, TokenTrace
from support.http_jobs import a_call, a_plan, a_worker, done, error_of, failed, ran, raw_of, run
from support.token_server import TokenServer, is_half, text_of, written
from support.upstream import DONE, Upstream, begin, chunk, event, usage
from support.waiting import async_until

Api = Literal["chat", "completions"]
APIS: tuple[Api, ...] = ("chat", "completions")


def text_in(raw: bytes) -> str:
    """The text in events as clients see them."""
    pieces = []
    for one in raw.split(b"\n\n"):
        if one:
            (choice,) = json.loads(one[6:])["choices"]
            pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(pieces)


@pytest.mark.parametrize("api", APIS)
def test_a_client_sees_the_same_bytes_whether_ids_are_followed_or_not(api: Api) -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer()) as up:
            followed = await ran(up, a_call(api=api, tokens=40))
            plain = await ran(up, a_call(api=api, tokens=40, resume=ResumeMode.RESTART))
            assert raw_of(followed) == raw_of(plain)
            assert b"null" in raw_of(followed)
            assert done(followed) == done(plain)
            assert [body.get("return_token_ids") for body in up.bodies] == [True, None]
            assert sum(i.tokens for i in followed if isinstance(i, Delta)) == 40

    run(scenario())


@pytest.mark.parametrize("api", APIS)
def test_a_client_that_asked_for_token_ids_gets_them(api: Api) -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer()) as up:
            followed = await ran(up, a_call(api=api, return_token_ids=True))
            plain = await ran(up, a_call(api=api, return_token_ids=True, resume=ResumeMode.RESTART))
            assert raw_of(followed) == raw_of(plain)
            assert b'"token_ids":[' in raw_of(followed)

    run(scenario())


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("breaks_after", range(1, 24, 3))
def test_an_interrupted_job_resumes_to_the_same_text(api: Api, breaks_after: int) -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer()) as whole, Upstream(TokenServer(breaks_after)) as broken:
            undisturbed = await ran(whole, a_call(api=api, tokens=30))
            first = await ran(broken, a_call(api=api, tokens=30))
            assert error_of(first).code == "worker_lost"
            resume_point = failed(first).resume_point
            assert resume_point is not None
            second = await ran(whole, a_call(api=api, tokens=30, resume_point=resume_point, attempt=2))
            rest = [item for item in second if isinstance(item, Delta)]
            assert all(not item.raw for item in rest)
            said = text_in(raw_of(first)) + "".join(item.text for item in rest)
            assert said == text_in(raw_of(undisturbed))
            ids = [one for item in rest for one in item.token_ids]
            assert [*resume_point.output_ids, *ids] == written(resume_point.prompt_ids, 30)
            end = done(second)
            assert (end.finish, end.raw) == (FinishReason.LENGTH, b"")
            assert end.usage.output_tokens == 30 - len(resume_point.output_ids)
            assert whole.bodies[-1]["max_tokens"] == 30 - len(resume_point.output_ids)
            assert whole.headers[-1]["x-request-id"] == "j-2"

    run(scenario())


def test_a_job_may_break_off_again_and_again() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(5)) as up:
            resume_point: ResumePoint | None = None
            text = ""
            for attempt in range(1, 30):
                items = await ran(up, a_call(tokens=40, resume_point=resume_point, attempt=attempt))
                text += text_in(raw_of(items)) + "".join(item.text for item in items if isinstance(item, Delta))
                if not hasattr(items[-1], "resume_point"):
                    break
                assert failed(items).resume_point is not None
                resume_point = failed(items).resume_point
            done(items)
            assert resume_point is not None
            assert text == text_of(written(resume_point.prompt_ids, 40))

    run(scenario())


def test_ids_whose_text_was_held_back_are_not_part_of_what_was_delivered() -> None:
    prompt = [5, 6, 7]
    halves = next(n for n, token in enumerate(written(prompt, 60)) if is_half(token))

    async def scenario() -> None:
        async with Upstream(TokenServer(halves + 1)) as up:
            items = await ran(up, a_call(api="completions", tokens=60))
            resume_point = failed(items).resume_point
            assert resume_point is not None
            assert resume_point == ResumePoint((5, 6, 7), tuple(written(prompt, halves)))

    run(scenario())


def test_a_cancelled_job_reports_its_partial_output() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(itl_s=0.01)) as up:
            worker, items = a_worker(up), list[Item]()
            await worker.start()
            running = asyncio.create_task(worker.run(a_plan(a_call(tokens=4000)), items.append))
            await async_until(lambda: len(items) > 3)
            assert await worker.cancel(["j"]) == {"j"}
            await running
            end = failed(items)
            assert isinstance(end.error, ClientClosed)
            assert end.resume_point is not None
            assert list(end.resume_point.output_ids) == written(
                end.resume_point.prompt_ids, len(end.resume_point.output_ids)
            )
            assert text_in(raw_of(items)) == text_of(end.resume_point.output_ids)
            await worker.close()

    run(scenario())


def test_a_job_that_may_not_resume_reports_no_resume_state() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer(3)) as up:
            items = await ran(up, a_call(resume=ResumeMode.RESTART))
            assert failed(items).resume_point is None
            assert "return_token_ids" not in up.bodies[0]

    run(scenario())


def test_a_server_that_returns_no_ids_cannot_continue() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer()) as up:
            up.returns_token_ids = False
            worker = a_worker(up)
            await worker.start()
            assert [card.can_resume for card in worker.cards()] == [False]
            items: list[Item] = []
            await worker.run(a_plan(a_call(resume_point=ResumePoint((1,), (2,)))), items.append)
            assert failed(items).error.can_failover
            assert failed(items).resume_point == ResumePoint((1,), (2,))
            assert not up.bodies
            await worker.close()
            worker = a_worker(up, profile=TGI)
            await worker.start()
            assert [card.can_resume for card in worker.cards()] == [False]
            await worker.close()

    run(scenario())


def test_a_continuation_keeps_how_tokens_are_chosen_and_nothing_else() -> None:
    async def scenario() -> None:
        fields: dict[str, Any] = {"temperature": 0.5, "seed": 3, "stop_token_ids": [2], "ignore_eos": True, "top_k": 9}
        others: dict[str, Any] = {"n": 1, "logprobs": None, "priority": -99, "min_tokens": 6}
        others["messages"] = [{"role": "user", "content": "secret"}]
        async with Upstream(TokenServer()) as up:
            job = a_call(tokens=9, resume_point=ResumePoint((1, 2), (3, 4)), **fields, **others)
            await ran(up, job, wants_priorities=True, salt_secret="s")
            body = up.bodies[0]
            assert body["prompt"] == [1, 2, 3, 4]
            assert body["max_tokens"] == 7
            assert body["min_tokens"] == 4
            assert body["priority"] == 0
            assert body["cache_salt"]
            assert (body["stream"], body["return_token_ids"]) == (True, True)
            assert {name: body[name] for name in fields} == fields
            assert not {"n", "messages", "logprobs"} & body.keys()

    run(scenario())


def test_a_job_that_broke_off_after_its_last_token_is_done_without_asking() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer()) as up:
            items = await ran(up, a_call(tokens=2, resume_point=ResumePoint((1, 2), (3, 4))))
            assert done(items).finish is FinishReason.LENGTH
            assert not up.bodies

    run(scenario())


def test_a_chat_without_a_limit_resumes_to_the_end_of_the_context() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer()) as up:
            job = a_call(tokens=2, resume_point=ResumePoint((1, 2), (3, 4, 5)), max_tokens=None)
            await ran(up, job)
            assert up.bodies[0]["max_tokens"] == 4096 - 5

    run(scenario())


TOOL = {"index": 0, "function": {"arguments": "{}"}}


@pytest.mark.parametrize(
    "odd",
    [
        {"index": 0, "delta": {"tool_calls": [TOOL]}, "finish_reason": None, "token_ids": [9]},
        {"index": 0, "delta": {"content": "x", "tool_calls": [TOOL]}, "finish_reason": None, "token_ids": [9]},
        {"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None, "token_ids": [9]},
        {"index": 0, "delta": {"content": "x", "reasoning_content": "hm"}, "finish_reason": None, "token_ids": [9]},
        {"index": 1, "delta": {"content": "x"}, "finish_reason": None, "token_ids": [9]},
        {"index": 0, "delta": {"content": "x"}, "finish_reason": None},
        {"index": 0, "delta": {"content": "x"}, "finish_reason": None, "token_ids": [-9]},
        {"index": 0, "delta": {"content": "x"}, "finish_reason": None, "token_ids": ["a"]},
    ],
)
def test_only_plain_text_calls_are_continued(odd: object) -> None:
    good = {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None, "token_ids": [4]}
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1]}
    trail = TokenTrace()
    trail.strip(event(opening))
    trail.strip(event({"choices": [good]}))
    assert trail.resume_point() == ResumePoint((1,), (4,))
    trail.strip(event({"choices": [odd]}))
    trail.strip(event({"choices": [good]}))
    assert trail.resume_point() is None


def test_generated_text_cannot_forge_token_ids() -> None:
    said = '"},"logprobs":null,"finish_reason":null,"token_ids":[666]}]} "prompt_token_ids":[1] ","'
    choice = {"index": 0, "delta": {"content": said}, "logprobs": None, "finish_reason": None}
    trail = TokenTrace()
    trail.strip(event({"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1]}))
    bare, count = trail.strip(event({"choices": [{**choice, "token_ids": [4, 5]}]}))
    assert trail.resume_point() == ResumePoint((1,), (4, 5))
    assert bare == event({"choices": [{**choice, "token_ids": None}]})
    assert count == 1


def test_events_that_come_together_are_followed_one_by_one() -> None:
    opening = event({"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1]})

    def piece(text: str, *ids: int) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return event({"choices": [{**choice, "token_ids": list(ids) or None}]})

    pieces = [piece("a", 1), piece("", 2), piece("b", 3), piece("c", 4, 5), piece("", 6)]
    for cuts in itertools.product([True, False], repeat=4):
        trail = TokenTrace()
        trail.strip(opening)
        batches = [pieces[0]]
        for cut, one in zip(cuts, pieces[1:], strict=True):
            if cut:
                batches.append(one)
            else:
                batches[-1] += one
        bare = b"".join(trail.strip(batch)[0] for batch in batches)
        assert trail.resume_point() == ResumePoint((1,), (1, 2, 3, 4, 5))
        assert bare == piece("a") + piece("") + piece("b") + piece("c") + piece("")


def test_a_continuation_that_ends_in_an_error_keeps_what_it_added() -> None:
    good = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [7]}
    ends = [
        (event({"error": {"message": "boom"}}) + DONE, "worker_lost"),
        (event({"choices": [{**good, "text": "", "token_ids": None, "finish_reason": "abort"}]}) + DONE, "worker_lost"),
        (b"data: {nonsense\n\n" + DONE, "worker_lost"),
        (DONE, "worker_lost"),
    ]

    async def scenario() -> None:
        for last, code in ends:

            async def script(up: Upstream, request: web.Request, body: Any, last: bytes = last) -> web.StreamResponse:
                response = await begin(request)
                await response.write(event({"choices": [good]}) + last)
                return response

            async with Upstream(script) as up:
                items = await ran(up, a_call(tokens=9, resume_point=ResumePoint((1, 2), (3,))))
                assert error_of(items).code == code
                assert failed(items).resume_point == ResumePoint((1, 2), (3, 7))

    run(scenario())


def test_a_continuation_that_no_longer_fits_the_context_is_done() -> None:
    async def scenario() -> None:
        async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            error = {"message": "This model's maximum context length is 4096 tokens.", "type": "BadRequestError"}
            return web.json_response({"error": error}, status=400)

        async with Upstream(script) as up:
            items = await ran(up, a_call(tokens=9, resume_point=ResumePoint((1, 2), (3,))))
            assert done(items).finish is FinishReason.LENGTH

    run(scenario())


def test_a_stream_with_only_a_role_resumes_from_the_prompt() -> None:
    trail = TokenTrace()
    trail.strip(
        event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1]})
    )
    assert trail.resume_point() == ResumePoint((1,), ())
    assert TokenTrace().resume_point() is None
    assert usage(1, 2) == TokenTrace().strip(usage(1, 2))[0]
    assert chunk("a") == TokenTrace().strip(chunk("a"))[0]


@pytest.mark.parametrize("api", APIS)
def test_a_stream_interrupted_within_a_character_resumes_with_that_character(api: Api) -> None:
    """Events that join several tokens do not say whether the last of them is half a character; the server does."""
    tokens, within = 40, 0

    def reads(ids: list[int]) -> str:
        return text_of(ids) + ("\ufffd" if is_half(ids[-1]) else "")

    async def scenario() -> None:
        nonlocal within
        async with Upstream(TokenServer()) as whole, Upstream(TokenServer()) as second:
            second.detokenize = reads
            expected = text_in(raw_of(await ran(whole, a_call(api=api, tokens=tokens))))
            for breaks_after in range(3, tokens, 3):
                async with Upstream(TokenServer(breaks_after=breaks_after, joins=3)) as first:
                    items = await ran(first, a_call(api=api, tokens=tokens))
                resume_point = failed(items).resume_point
                assert resume_point is not None
                within += bool(resume_point.output_ids) and is_half(resume_point.output_ids[-1])
                again = await ran(second, a_call(api=api, tokens=tokens, resume_point=resume_point))
                text = "".join(item.text for item in again if isinstance(item, Delta))
                assert text_in(raw_of(items)) + text == expected

    run(scenario())
    assert within


def test_without_detokenization_a_job_resumes_from_all_its_ids() -> None:
    async def scenario() -> None:
        async with Upstream(TokenServer()) as up:
            prompt, before = (1, 2, 3), tuple(written([1, 2, 3], 5))
            items = await ran(up, a_call(api="completions", tokens=8, resume_point=ResumePoint(prompt, before)))
            ids = [token for item in items if isinstance(item, Delta) for token in item.token_ids]
            assert [*before, *ids] == written(prompt, 8)

    run(scenario())


@pytest.mark.parametrize("counts", ['"3"', "NaN", "true", "3.5"])
def test_malformed_usage_does_not_fail_a_resumed_call(counts: str) -> None:
    scanner = ContinuationScanner(ResumePoint((1, 2), (3,)))
    piece = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [4]}
    malformed = event({"choices": [], "usage": {"prompt_tokens": "COUNT"}}).replace(b'"COUNT"', counts.encode())
    assert scanner.read(event({"choices": [piece]}) + malformed + DONE) == ("a", (4,))
    assert (scanner.error, scanner.usage, scanner.is_done) == (None, None, True)
