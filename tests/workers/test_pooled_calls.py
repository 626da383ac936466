"""Embeddings and scores at an HTTP server: several jobs in one request, each with its own answer and end."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from inferry.domain.errors import ClientClosed, InvalidRequest, WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.domain.pooling import Classification
from inferry.domain.routes import ALL_TASKS, Task
from inferry.domain.streams import Done, Failed, Item
from inferry.workers.openai_http.pooled_calls import MAX_REPEATED_BYTES
from inferry.workers.openai_http.profiles import HOSTED, SGLANG, TGI
from inferry.workers.openai_http.worker import OpenAIHttpWorker
from support.http_jobs import a_call, a_plan, a_worker, run
from support.pooling import (
    REFUSED,
    a_classification,
    a_score,
    an_embedding,
    answers,
    label_of,
    pools,
    probs_of,
    score_of,
    vector_of,
)
from support.upstream import Upstream
from support.waiting import async_until


def a_pooling_server(**more: Any) -> Upstream:
    up = Upstream()
    up.pools = pools
    for name, value in more.items():
        setattr(up, name, value)
    return up


async def ran(up: Upstream, *jobs: InferenceJob, **settings: Any) -> list[Item]:
    worker = a_worker(up, **settings)
    items: list[Item] = []
    try:
        await worker.start()
        await worker.run(a_plan(*jobs), items.append)
        assert worker.open_calls == 0
    finally:
        await worker.close()
    return items


def ends(items: list[Item]) -> dict[str, Done | Failed]:
    found = [item for item in items if isinstance(item, Done | Failed)]
    assert len({end.job_id for end in found}) == len(found)
    return {end.job_id: end for end in found}


def test_jobs_of_one_batch_key_share_a_request() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            jobs = [an_embedding(f"j{number}", f"text {number}") for number in range(40)]
            items = await ran(up, *jobs)
            assert [len(body["input"]) for body in up.bodies] == [40]
            assert answers(items) == {f"j{number}": [vector_of(f"text {number}")] for number in range(40)}
            used = {job_id: end.usage.prompt_tokens for job_id, end in ends(items).items()}
            assert used == {f"j{number}": len(f"text {number}") for number in range(40)}

    run(scenario())


def test_other_groups_tasks_and_generating_jobs_have_requests_of_their_own() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            items = await ran(
                up,
                an_embedding("a1", "one"),
                an_embedding("b1", "two", tenant="b"),
                a_call("chat"),
                a_score("s1", ["x"], ["y"]),
                an_embedding("a2", "three"),
                an_embedding("b2", "four", tenant="b"),
                a_score("s2", ["p", "q"], ["r", "s"]),
            )
            requests = [body.get("input") or (body.get("text_1"), body.get("text_2")) for body in up.bodies]
            expected = [["one", "three"], ["two", "four"], (["x", "p", "q"], ["y", "r", "s"]), (None, None)]
            assert sorted(map(str, requests)) == sorted(map(str, expected))
            found = answers([item for item in items if item.job_id != "chat"])
            assert found["s2"] == [score_of("p", "r"), score_of("q", "s")]
            assert found["b2"] == [vector_of("four")]
            assert len(ends(items)) == 7

    run(scenario())


def test_classifications_share_a_request_to_the_servers_own_path() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            items = await ran(up, a_classification("c1", "x", "y"), an_embedding("e", "x"), a_classification("c2", [5]))
            assert sorted(len(body["input"]) for body in up.bodies) == [1, 3]
            assert not any("encoding_format" in body for body in up.bodies if len(body["input"]) == 3)
            found = answers(items)
            assert found["c1"] == [Classification(label_of(one), probs_of(one)) for one in ("x", "y")]
            assert found["c2"] == [Classification(label_of([5]), probs_of([5]))]
            assert found["e"] == [vector_of("x")]

    run(scenario())


@pytest.mark.parametrize("result", [{"label": "low", "probs": []}, {"label": "low", "probs": ["a"]}, {"label": "low"}])
def test_a_classification_without_probabilities_is_malformed(result: dict[str, Any]) -> None:
    async def answers_so(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"data": [{"index": 0, **result}]})

    async def scenario() -> None:
        async with a_pooling_server(pools=answers_so) as up:
            (end,) = ends(await ran(up, a_classification("c", "x"))).values()
            assert isinstance(end, Failed)
            assert isinstance(end.error, WorkerLost)

    run(scenario())


def test_a_tenants_requests_are_salted_with_its_own_salt() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            await ran(up, an_embedding("a", "one"), an_embedding("b", "two", tenant="b"), cache_salts=True)
            assert len({body["cache_salt"] for body in up.bodies}) == 2

    run(scenario())


def test_scores_of_one_text_with_several_share_a_request_as_pairs() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            jobs = (a_score("many", ["query"], ["a", "b"]), a_score("pairs", ["x", "y"], ["z", "q"]))
            items = await ran(up, *jobs, a_score("more", ["other"], ["c", "d", "e"]))
            assert [(body["text_1"], body["text_2"]) for body in up.bodies] == [
                (["query"] * 2 + ["x", "y"] + ["other"] * 3, ["a", "b", "z", "q", "c", "d", "e"])
            ]
            assert answers(items) == {
                "many": [score_of("query", "a"), score_of("query", "b")],
                "pairs": [score_of("x", "z"), score_of("y", "q")],
                "more": [score_of("other", one) for one in "cde"],
            }
            used = {job_id: end.usage.prompt_tokens for job_id, end in ends(items).items()}
            assert used == {"many": 12, "pairs": 4, "more": 18}

    run(scenario())


def test_a_split_score_of_one_text_with_several_shares_its_last_request() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            documents = [f"document {number}" for number in range(12)]
            items = await ran(up, a_score("big", ["q"], documents), a_score("small", ["r"], ["s", "t"]), max_inputs=10)
            assert sorted(len(body["text_2"]) for body in up.bodies) == [4, 10]
            assert answers(items)["big"] == [score_of("q", document) for document in documents]
            assert answers(items)["small"] == [score_of("r", "s"), score_of("r", "t")]

    run(scenario())


def test_a_text_that_is_not_repeated_is_sent_once() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            long = "q" * (MAX_REPEATED_BYTES // 2)
            items = await ran(up, a_score("long", [long], ["a", "b", "c"]), a_score("one", ["q"], ["c"]))
            assert sorted((len(body["text_1"]), len(body["text_2"])) for body in up.bodies) == [(1, 1), (1, 3)]
            assert answers(items)["long"] == [score_of(long, one) for one in "abc"]

    run(scenario())

    run(scenario())


def test_a_refused_input_fails_its_own_job_only() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            items = await ran(up, an_embedding("good", "a"), an_embedding("bad", REFUSED), an_embedding("fine", "b"))
            assert len(up.bodies) == 4
            assert answers(items) == {"good": [vector_of("a")], "fine": [vector_of("b")]}
            end = ends(items)["bad"]
            assert isinstance(end, Failed)
            assert isinstance(end.error, InvalidRequest)

    run(scenario())


def test_a_job_larger_than_a_request_is_split_and_joined_again() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            texts = [f"text {number}" for number in range(23)]
            items = await ran(up, an_embedding("big", *texts), an_embedding("small", "last"), max_inputs=10)
            assert sorted(len(body["input"]) for body in up.bodies) == [4, 10, 10]
            found = answers(items)
            assert found == {"big": [vector_of(text) for text in texts], "small": [vector_of("last")]}
            used = sum(end.usage.prompt_tokens for end in ends(items).values())
            assert used == sum(map(len, texts)) + 4

    run(scenario())


def test_vectors_in_decimal_are_taken_too() -> None:
    async def decimal(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await pools(up, request, body | {"encoding_format": "float"})

    async def scenario() -> None:
        async with a_pooling_server(pools=decimal) as up:
            assert answers(await ran(up, an_embedding("j", "text"))) == {"j": [vector_of("text")]}

    run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"nonsense",
        b'{"data":[]}',
        b'{"data":[{"index":0,"embedding":"%%%"}]}',
        b'{"data":[{"index":3,"score":1}]}',
    ],
)
def test_a_malformed_answer_loses_every_job_of_the_request(body: bytes) -> None:
    async def broken(up: Upstream, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async def scenario() -> None:
        async with a_pooling_server() as up:
            worker = a_worker(up)
            await worker.start()
            up.pools = broken
            items: list[Item] = []
            await worker.run(a_plan(an_embedding("a", "x"), an_embedding("b", "y")), items.append)
            await worker.close()
            errors = [end.error for end in ends(items).values() if isinstance(end, Failed)]
            assert [type(error) for error in errors] == [WorkerLost, WorkerLost]

    run(scenario())


async def _held(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if "ping" not in str(body):
        await up.release.wait()
    return await pools(up, request, body)


def test_a_cancelled_job_leaves_its_request_to_the_others() -> None:
    async def scenario() -> None:
        async with a_pooling_server(pools=_held) as up:
            worker = a_worker(up)
            await worker.start()
            items: list[Item] = []
            plan = asyncio.create_task(worker.run(a_plan(an_embedding("a", "x"), an_embedding("b", "y")), items.append))
            await async_until(lambda: up.bodies)
            assert await worker.cancel(["a"]) == frozenset()
            assert [type(end.error) for end in ends(items).values() if isinstance(end, Failed)] == [ClientClosed]
            up.release.set()
            await plan
            assert answers(items) == {"b": [vector_of("y")]}
            assert worker.cancelled_unconfirmed == 1
            await worker.close()

    run(scenario())


def test_a_request_ends_with_the_last_of_its_jobs() -> None:
    async def scenario() -> None:
        async with a_pooling_server(pools=_held) as up:
            worker = a_worker(up)
            await worker.start()
            items: list[Item] = []
            plan = asyncio.create_task(worker.run(a_plan(an_embedding("a", "x"), an_embedding("b", "y")), items.append))
            await async_until(lambda: up.bodies)
            assert await worker.cancel(["a", "b"]) == {"a", "b"}
            await up.gone.wait()
            await plan
            assert worker.open_calls == 0
            assert len(ends(items)) == 2
            await worker.close()

    run(scenario())


def test_a_cancelled_plan_closes_its_requests() -> None:
    async def scenario() -> None:
        async with a_pooling_server(pools=_held) as up:
            worker = a_worker(up)
            await worker.start()
            plan = asyncio.create_task(worker.run(a_plan(an_embedding("a", "x")), lambda item: None))
            await async_until(lambda: up.bodies)
            assert worker.open_calls == 1
            plan.cancel()
            await up.gone.wait()
            assert worker.open_calls == 0
            await worker.close()

    run(scenario())


def test_every_input_counts_as_a_call_of_the_engine() -> None:
    async def scenario() -> None:
        async with a_pooling_server(pools=_held) as up:
            worker = a_worker(up)
            await worker.start()
            jobs = [an_embedding(f"j{number}", "x", "y") for number in range(5)]
            plan = asyncio.create_task(worker.run(a_plan(*jobs), lambda item: None))
            await async_until(lambda: up.bodies)
            assert worker.open_calls == 10
            up.release.set()
            await plan
            assert (worker.open_calls, worker.ended_calls) == (0, 10)
            await worker.close()

    run(scenario())


def test_a_lost_connection_loses_every_job_of_the_request() -> None:
    async def dies(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "ping" in str(body):
            return await pools(up, request, body)
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def scenario() -> None:
        async with a_pooling_server(pools=dies) as up:
            items = await ran(up, an_embedding("a", "x"), an_embedding("b", "y"))
            assert all(isinstance(end, Failed) and end.error.can_failover for end in ends(items).values())

    run(scenario())


def tasks_of(worker: OpenAIHttpWorker) -> frozenset[Task]:
    return worker.cards()[0].tasks


def test_what_a_server_does_is_detected() -> None:
    async def scenario() -> None:
        for generates, does, expected in (
            (True, None, {Task.GENERATE}),
            (False, pools, {Task.EMBED, Task.SCORE, Task.CLASSIFY}),
            (True, pools, ALL_TASKS),
        ):
            async with Upstream() as up:
                up.generates, up.pools = generates, does
                worker = a_worker(up)
                await worker.start()
                assert tasks_of(worker) == expected
                await worker.close()

    run(scenario())


def test_configured_tasks_and_other_kinds_are_not_asked() -> None:
    async def scenario() -> None:
        async with a_pooling_server() as up:
            for settings, expected in (
                ({"tasks": frozenset({Task.EMBED})}, {Task.EMBED}),
                ({"profile": TGI}, {Task.GENERATE}),
                ({"profile": HOSTED, "models": ("m",)}, {Task.GENERATE, Task.EMBED}),
                ({"profile": SGLANG}, {Task.GENERATE, Task.EMBED}),
            ):
                worker = a_worker(up, **settings)
                await worker.start()
                assert tasks_of(worker) == expected
                await worker.close()

    run(scenario())
