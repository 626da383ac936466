"""Resumed streams with stop strings end like undisturbed ones, wherever they were interrupted."""

import itertools
import json
import random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.jobs import InferenceJob, ResumePoint
from inferry.domain.streams import Delta, Done, Failed, Item
from inferry.domain.values import replace
from inferry.workers.in_process.engine_jobs import undelivered_text
from inferry.workers.openai_http.token_trace import RECENT_EVENTS, TracingScanner
from inferry.workers.resumed_stop_strings import StopMatcher, held_back_chars
from support.http_jobs import a_call, a_plan, a_worker, failed, ran, raw_of, run
from support.stop_server import StopServer, next_id, read, texts
from support.upstream import Upstream, event

Api = Literal["chat", "completions"]
TOKENS = 24


def a_stopped(
    stops: list[str], resume_point: ResumePoint | None = None, api: Api = "completions", **fields: Any
) -> InferenceJob:
    job = a_call(api=api, tokens=TOKENS, stop=stops, resume_point=resume_point, **fields)
    sampling = replace(job.payload.sampling, stop=tuple(stops))
    return replace(job, payload=replace(job.payload, sampling=sampling, output_limit=TOKENS))


def told(items: list[Item]) -> tuple[str, str | None, Any]:
    """Text, finish reason and stop reason, whichever way they came."""
    text, finish, reason = "", None, None
    for item in items:
        if isinstance(item, Delta):
            text += item.text
            for part in item.raw.split(b"\n\n"):
                if part:
                    (choice,) = json.loads(part[6:])["choices"]
                    text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
                    finish, reason = choice["finish_reason"], choice.get("stop_reason")
    end = items[-1]
    if isinstance(end, Done) and not raw_of(items):
        finish, reason = end.finish.value, end.stop_reason
    return text, finish, reason


async def output_of(up: Upstream, api: Api) -> str:
    """What it writes where nothing stops it."""
    return told(await ran(up, a_stopped(["never"], api=api)))[0]


def stops_around(text: str, seed: int) -> list[str]:
    """Strings that are in the text, and some that are not."""
    chosen = random.Random(seed)
    at = chosen.randrange(2, len(text) - 8)
    stops = [text[at : at + chosen.randint(1, 8)]]
    if seed % 2:
        other = chosen.randrange(2, len(text) - 4)
        stops.append(text[other : other + chosen.randint(2, 5)])
    if seed % 3 == 0:
        stops.insert(0, "a b\nnever" * chosen.randint(1, 3))
    return stops


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("joins", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_job_with_stop_strings_resumes_exactly_from_any_point(api: Api, joins: int, seed: int) -> None:
    fields: dict[str, Any] = {}
    if seed % 4 == 1:
        fields["include_stop_str_in_output"] = True
    if seed % 4 == 2:
        fields["min_tokens"] = 7

    async def scenario() -> None:
        async with Upstream(StopServer()) as whole, Upstream(StopServer()) as broken:
            whole.detokenize = read
            stops = stops_around(await output_of(whole, api), seed)
            expected = told(await ran(whole, a_stopped(stops, api=api, **fields)))
            worker, first = a_worker(whole), a_worker(broken)
            await worker.start()
            await first.start()
            for breaks_after in range(TOKENS):
                broken.script = StopServer(breaks_after, joins)
                items: list[Item] = []
                await first.run(a_plan(a_stopped(stops, api=api, **fields)), items.append)
                text, finish, reason = told(items)
                end = items[-1]
                if isinstance(end, Done):
                    assert (text, finish, reason) == expected
                    break
                assert isinstance(end, Failed)
                if end.resume_point is None:
                    assert not text, "only what nobody has seen starts again"
                    continue
                rest: list[Item] = []
                await worker.run(a_plan(a_stopped(stops, end.resume_point, api=api, **fields)), rest.append)
                more, finish, reason = told(rest)
                assert (text + more, finish, reason) == expected, (breaks_after, stops, end.resume_point.output_ids)
                assert "stop" not in whole.bodies[-1]
            await worker.close()
            await first.close()

    run(scenario())


def test_a_job_with_stop_strings_may_resume_repeatedly() -> None:
    async def scenario() -> None:
        async with Upstream(StopServer()) as whole, Upstream(StopServer()) as up:
            up.detokenize = read
            for seed, every in itertools.product(range(6), (2, 3, 5)):
                stops = stops_around(await output_of(whole, "completions"), seed)
                expected = told(await ran(whole, a_stopped(stops)))
                up.script = StopServer(every)
                worker = a_worker(up)
                await worker.start()
                text, resume_point = "", None
                for _ in range(TOKENS + 2):
                    items: list[Item] = []
                    await worker.run(a_plan(a_stopped(stops, resume_point)), items.append)
                    more, finish, reason = told(items)
                    text += more
                    if isinstance(items[-1], Done):
                        break
                    resume_point = failed(items).resume_point
                    assert resume_point is not None
                assert (text, finish, reason) == expected
                await worker.close()

    run(scenario())


def test_a_job_that_broke_off_after_its_last_token_gets_what_was_held_back() -> None:
    async def scenario() -> None:
        async with Upstream(StopServer()) as whole:
            whole.detokenize = read
            expected = told(await ran(whole, a_stopped(["never in it"])))
            prompt = (5, 6, 7)
            ids = list(prompt)
            for _ in range(TOKENS):
                ids.append(next_id(ids))
            text = "".join(texts(ids)[3:])
            calls = len(whole.bodies)
            items = await ran(whole, a_stopped(["never in it"], ResumePoint(prompt, tuple(ids[3:]))))
            assert len(whole.bodies) == calls
            rest, finish, _ = told(items)
            assert text[: -held_back_chars(["never in it"], includes_stop=False)] + rest == expected[0]
            assert finish == "length"

    run(scenario())


def test_a_server_that_cannot_read_ids_does_not_guess() -> None:
    async def scenario() -> None:
        async with Upstream(StopServer()) as up:
            items = await ran(up, a_stopped(["ab"], ResumePoint((5, 6, 7), (1, 2))))
            assert failed(items).error.can_failover
            assert failed(items).resume_point == ResumePoint((5, 6, 7), (1, 2))

    run(scenario())


def test_ids_that_do_not_match_the_delivered_text_are_not_resumed() -> None:
    async def scenario() -> None:
        async with Upstream(StopServer()) as up:
            up.detokenize = read
            resume_point = ResumePoint((5, 6, 7), (0, 1, 0, 1), tail="aba")
            assert failed(await ran(up, a_stopped(["xy"], replace(resume_point, tail="abb")))).error.can_failover
            assert isinstance((await ran(up, a_stopped(["xy"], resume_point)))[-1], Done)

    run(scenario())


@pytest.mark.parametrize("count", [4, 200])
def test_text_of_which_nothing_was_delivered_is_delivered_after_the_resume(count: int) -> None:
    async def scenario() -> None:
        async with Upstream(StopServer()) as up:
            up.detokenize = read
            ids = (0, 1) * (count // 2)
            items = await ran(up, a_stopped(["xy"], ResumePoint((5, 6, 7), ids, tail="")))
            assert told(items)[0].startswith("ab" * (count // 2))
            items = await ran(up, a_stopped(["xy"], ResumePoint((5, 6, 7), ids)))
            assert not told(items)[0].startswith("abab"), "by the rule, all but one character was delivered"

    run(scenario())


def test_an_engine_that_held_back_less_than_the_rule_says_is_not_resumed() -> None:
    async def scenario() -> None:
        async with Upstream(StopServer()) as up:
            up.detokenize = read
            resume_point = ResumePoint((5, 6, 7), (0, 1, 0, 1), tail="abab")
            assert failed(await ran(up, a_stopped(["a long stop string"], resume_point))).error.can_failover

    run(scenario())


def test_a_stream_without_any_text_so_far_says_so() -> None:
    scanner = TracingScanner(engine_holds_text=True)
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    scanner.scan(event({**opening, "prompt_token_ids": [1]}))
    choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None, "token_ids": [4]}
    for _ in range(2 * RECENT_EVENTS):
        scanner.scan(event({"choices": [choice]}))
    assert scanner.resume_point() == ResumePoint((1,), (4,) * 2 * RECENT_EVENTS, tail="")
    scanner.scan(event({"choices": [{**choice, "delta": {"content": "a"}}]}))
    for _ in range(RECENT_EVENTS):
        scanner.scan(event({"choices": [choice]}))
    assert scanner.resume_point() == ResumePoint((1,), (4,) * (3 * RECENT_EVENTS + 1)), "the text is too long ago"


def test_an_engine_in_process_delivers_text_of_which_nothing_was_delivered() -> None:
    undelivered = ResumePoint((1,), (2, 3), tail="")
    assert undelivered_text(undelivered, "some text", "x", ("xy",)) == "some text"
    assert undelivered_text(replace(undelivered, tail="tex"), "some text", "x", ("xyz",)) == "t"


WORDS = st.text("ab", min_size=1, max_size=4)


@given(
    pieces=st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    stops=st.lists(WORDS, min_size=1, max_size=3),
    includes_stop=st.booleans(),
    least=st.integers(0, 3),
    data=st.data(),
)
def test_resumed_text_equals_undisturbed_text(
    pieces: list[str], stops: list[str], includes_stop: bool, least: int, data: st.DataObject
) -> None:
    def through(resume_stop_matcher: StopMatcher, pieces: list[str], before: int) -> tuple[str, str | None, int]:
        text = ""
        for number, piece in enumerate(pieces, 1):
            more, found = resume_stop_matcher.push(piece, before + number)
            text += more
            if found is not None:
                return text, found, number
        return text, None, len(pieces)

    whole = StopMatcher(stops, "", 0, includes_stop=includes_stop, min_tokens=least)
    expected, found, upto = through(whole, pieces, 0)
    expected += "" if found else whole.finish()
    cut = data.draw(st.integers(0, upto - 1 if found else upto))
    first = StopMatcher(stops, "", 0, includes_stop=includes_stop, min_tokens=least)
    text, nothing, _ = through(first, pieces[:cut], 0)
    assert nothing is None
    before = "".join(pieces[:cut])
    unsent = min(len(before), held_back_chars(stops, includes_stop=includes_stop))
    assert before[len(before) - unsent :] == first.unsent
    end = before[-max(map(len, stops)) :] if len(before) > max(map(len, stops)) else before
    second = StopMatcher(stops, end, unsent, includes_stop=includes_stop, min_tokens=least)
    more, again, _ = through(second, pieces[cut:], cut)
    more += "" if again else second.finish()
    assert (text + more, again) == (expected, found)


def test_text_that_only_looks_like_events_is_not_resumed() -> None:
    scanner = TracingScanner(engine_holds_text=True)
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    scanner.scan(event({**opening, "prompt_token_ids": [1]}))
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None, "token_ids": [4]}
    good = event({"choices": [choice]})
    scanner.scan(good)
    assert scanner.resume_point() == ResumePoint((1,), (4,), tail="a")
    scanner.scan(good.replace(b"}]}\n\n", b"}]\n\n"))
    assert scanner.resume_point() is None
