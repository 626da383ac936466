"""The client against a gateway, over real sockets."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inferry.client import (
    AsyncClient,
    BudgetExhausted,
    CallError,
    Client,
    Completion,
    InvalidCall,
    NotFound,
    Piece,
    RunCancelled,
    Usage,
)
from inferry.client.sync_client import LoopThread
from support.http_gateway import HttpGateway
from support.scripted_model import ScriptedModel, ScriptedModelGateway
from support.serving import Serving
from support.upstream import Upstream, begin, chunk, role

HELLO = [{"role": "user", "content": "Hello"}]
THINK = [{"role": "user", "content": "Think, then tell me the weather in Bern."}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
PRICES = {"*": {"input": 1.0, "output": 1.0}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    with ScriptedModelGateway(tmp_path_factory.mktemp("client"), {"prices": PRICES}) as serving:
        yield serving


@pytest.fixture
def upstream(gateway: HttpGateway) -> Iterator[Upstream]:
    gateway.upstream.script = ScriptedModel().script
    yield gateway.upstream
    gateway.upstream.script = ScriptedModel().script


@pytest.fixture(scope="module")
def key(gateway: HttpGateway) -> str:
    return gateway.key("acme")


@pytest.fixture
def client(gateway: HttpGateway, key: str, upstream: Upstream) -> Iterator[Client]:
    with Client(gateway.url, api_key=key) as client:
        yield client


class Endless:
    """A script that writes one piece and then waits. `started` and `gone` count calls."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.gone = threading.Semaphore(0)

    async def script(self, upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(role() + chunk("a"))
        self.started.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.gone.release()
        return response


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_whole_and_a_streamed_answer(client: Client) -> None:
    whole = client.complete(THINK, model="m", tools=[WEATHER])
    assert whole.reasoning
    assert whole.finish == "tool_calls"
    assert whole.tool_calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert (whole.lane, whole.worker) == ("P1", "up")
    with client.stream(THINK, model="m", tools=[WEATHER], lane="P0") as stream:
        pieces = list(stream)
    assert "".join(piece.reasoning for piece in pieces) == whole.reasoning
    streamed = stream.completion
    assert (streamed.finish, streamed.tool_calls, streamed.lane) == (whole.finish, whole.tool_calls, "P0")
    assert (whole.usage, streamed.usage) == (Usage(8, 12), Usage(8, 12, cached_tokens=8))


def test_text_and_token_ids_on_the_embedded_engine(real: Serving) -> None:
    with Client(real.url) as client:
        whole = client.complete("Hello", model="tiny", max_tokens=8, temperature=0)
        with client.stream("Hello", model="tiny", max_tokens=8, temperature=0) as stream:
            text = "".join(piece.text for piece in stream)
        assert text == whole.text == stream.completion.text
        assert whole.usage.output_tokens == stream.completion.usage.output_tokens == 8
        assert client.complete([5, 6, 7], model="tiny", max_tokens=2).usage.prompt_tokens == 3


def test_other_endpoints(client: Client) -> None:
    assert [model["id"] for model in client.request("GET", "/v1/models")["data"]] == ["m"]
    with pytest.raises(NotFound):
        client.request("GET", "/v1/nothing")


def test_errors_are_typed(client: Client) -> None:
    with pytest.raises(NotFound) as unknown:
        client.complete(HELLO, model="nope")
    assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")
    assert unknown.value.request_id
    with pytest.raises(InvalidCall) as invalid:
        client.complete(HELLO, model="m", temperature=9)
    assert invalid.value.param == "temperature"
    with pytest.raises(NotFound), client.stream(HELLO, model="nope") as stream:
        next(stream)


def test_the_same_on_asyncio(gateway: HttpGateway, key: str, upstream: Upstream) -> None:
    async def scenario() -> None:
        async with AsyncClient(gateway.url, api_key=key) as client, client.run(lane="P0") as run:
            whole = await run.complete(HELLO, model="m", step="greet")
            assert (whole.step, whole.lane) == ("greet", "P0")
            async with run.stream(HELLO, model="m") as stream:
                assert "".join([piece.text async for piece in stream]) == whole.text
            assert (await run.status())["steps"] == 2

    asyncio.run(scenario())


# -- many calls --------------------------------------------------------------------------------------------------------


async def refuses_bad_prompts(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if "bad" in body["prompt"]:
        return web.json_response({"error": {"message": "bad", "code": 400}}, status=400)
    return await ScriptedModel().script(upstream, request, body)


def test_results_are_in_order_with_an_error_for_each_failed_item(client: Client, upstream: Upstream) -> None:
    upstream.script = refuses_bad_prompts
    prompts = ["one", "one two", "a bad one", "one two three"]
    with client.run() as run:
        results = run.batch_complete(prompts, model="m", concurrency=2, step="item")
        assert [type(one) for one in results] == [Completion, Completion, InvalidCall, Completion]
        texts = [one.text.split(" words")[0][-1] for one in results if isinstance(one, Completion)]
        assert texts == ["1", "2", "3"]
        assert [one.step for one in results if isinstance(one, Completion)] == ["item-0", "item-1", "item-3"]
        assert {one.lane for one in results if isinstance(one, Completion)} == {"P2"}
        assert run.status()["jobs"]["ended"] == 4
    assert client.batch_complete([], model="m") == []


def test_texts_are_sent_several_in_one_call(real: Serving) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    with Client(real.url) as client, client.run() as run:
        results = run.batch_complete(prompts, model="tiny", max_tokens=4, temperature=0)
        single = run.concurrent_complete(prompts, model="tiny", max_tokens=4, temperature=0, lane="P2")
        texts = [[one.text for one in found if isinstance(one, Completion)] for found in (results, single)]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 20
        used = [
            sum(one.usage.output_tokens for one in found if isinstance(one, Completion)) for found in (results, single)
        ]
        assert used[0] == used[1]
        steps = {one.step for one in results if isinstance(one, Completion)}
        assert len(steps) == 2, "16 and 4 prompts"
        ids = run.batch_complete([[5, 6], [7, 8, 9], "text"], model="tiny", max_tokens=2)
        assert all(isinstance(one, Completion) for one in ids), "kinds that one call cannot mix are sent one by one"


def test_prompts_of_a_refused_call_are_sent_one_by_one(client: Client, upstream: Upstream) -> None:
    upstream.script = refuses_bad_prompts
    results = client.batch_complete(["one", "a bad one", "one two"], model="m")
    assert [type(one) for one in results] == [Completion, InvalidCall, Completion]


def test_calls_beyond_the_concurrency_wait(client: Client, gateway: HttpGateway, upstream: Upstream) -> None:
    most = 0

    async def counting(upstream: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal most
        most = max(most, len(upstream.running))
        if most < 3:  # the first two wait until a third has come
            async with asyncio.timeout(120):
                while most < 3:
                    await asyncio.sleep(0.01)
        return await ScriptedModel().script(upstream, request, body)

    upstream.script = counting
    results = client.concurrent_complete([f"prompt {n}" for n in range(12)], model="m", concurrency=3)
    assert all(isinstance(one, Completion) for one in results)
    assert most == 3
    with pytest.raises(ValueError, match="concurrency"):
        client.concurrent_complete(["x"], model="m", concurrency=0)


def test_several_threads_share_a_client(client: Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda n: client.complete("word " * n, model="m").text, range(1, 20)))
    assert [text.split()[4] for text in texts] == [str(n) for n in range(1, 20)]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_that_ends_normally_is_finished(client: Client) -> None:
    with client.run("good") as run, run.sub_run() as sub:
        run.complete(HELLO, model="m")
        sub.complete(HELLO, model="m")
    status = run.status()
    assert (status["status"], status["sub_runs"]) == ("finished", [sub.id])
    assert status["tree"]["jobs"] == 2
    assert sub.status()["parent_run_id"] == "good"


def test_a_run_without_calls_ends_quietly(client: Client) -> None:
    with client.run():
        pass
    with pytest.raises(ZeroDivisionError), client.run():
        _ = 1 / 0


def test_an_exception_cancels_the_run_and_its_sub_runs(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.run() as run:
        sub = run.sub_run("a/b")
        sub.complete(HELLO, model="m")
        _ = 1 / 0
    assert run.status()["status"] == sub.status()["status"] == "cancelled"
    for one in (run, sub):
        with pytest.raises(RunCancelled):
            one.complete(HELLO, model="m")


def test_a_run_is_cancelled_from_another_thread(client: Client, upstream: Upstream) -> None:
    endless = Endless()
    upstream.script = endless.script
    with client.run() as run, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(run.complete, HELLO, model="m")
        assert endless.started.acquire(timeout=120)
        report = run.cancel()
        assert (report["queued"], report["running"]) == (0, 1)
        with pytest.raises(RunCancelled):
            waiting.result(120)
    assert run.status()["status"] == "cancelled", "leaving the scope does not reopen it"


def test_a_cancelled_task_cancels_its_run(gateway: HttpGateway, key: str, upstream: Upstream) -> None:
    endless = Endless()
    upstream.script = endless.script

    async def scenario() -> None:
        async with AsyncClient(gateway.url, api_key=key) as client:
            run = client.run()

            async def agent() -> None:
                async with run:
                    await run.complete(HELLO, model="m")

            task = asyncio.create_task(agent())
            assert await asyncio.to_thread(endless.started.acquire, timeout=120)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await run.status())["status"] == "cancelled"

    asyncio.run(scenario())
    assert endless.gone.acquire(timeout=120)


@pytest.mark.parametrize("in_run", [False, True])
def test_an_interrupt_closes_the_connection_and_cancels_the_run(
    client: Client, upstream: Upstream, *, in_run: bool
) -> None:
    endless = Endless()
    upstream.script = endless.script
    main = threading.get_ident()

    def interrupt() -> None:
        assert endless.started.acquire(timeout=120)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = client.run()
    with pytest.raises(KeyboardInterrupt):
        if in_run:
            with run:
                run.complete(HELLO, model="m")
        else:
            client.complete(HELLO, model="m")
    thread.join()
    assert endless.gone.acquire(timeout=120)
    if in_run:
        assert run.status()["status"] == "cancelled"


def test_an_interrupted_thread_cancels_its_work() -> None:
    thread, main, events = LoopThread(), threading.get_ident(), []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.pthread_kill, main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    thread.run(asyncio.sleep(0))  # runs on the same loop, after the cancellation
    assert events == ["cancelled"]
    thread.close()


def test_an_interrupt_while_the_work_is_handed_over_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread()

    async def count_tasks() -> int:
        return len(asyncio.all_tasks())

    assert thread.run(count_tasks()) == 1
    loop = thread._started()
    hand_over = loop.call_soon_threadsafe

    def interrupted(*args: Any) -> None:
        monkeypatch.undo()
        hand_over(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(asyncio.Event().wait())
    assert thread.run(count_tasks()) == 1, "the work goes on"
    thread.close()


def test_a_stream_that_is_left_ends_at_the_worker(client: Client, upstream: Upstream) -> None:
    endless = Endless()
    upstream.script = endless.script
    with client.stream(HELLO, model="m") as stream:
        assert next(stream) == Piece("a")
    assert endless.gone.acquire(timeout=120)
    with pytest.raises(StopIteration):
        next(stream)


def test_budgets_are_checked_before_each_call(client: Client, upstream: Upstream) -> None:
    for budget in ({"token_budget": 20}, {"money_budget": 0.00002}):
        with client.run(**budget) as run:
            used = run.complete(HELLO, model="m").usage  # 15 of 20
            assert used.prompt_tokens + used.output_tokens < 20
            run.complete(HELLO, model="m")
            sent = len(upstream.bodies)
            with pytest.raises(BudgetExhausted) as refused:
                run.complete(HELLO, model="m")
            (result,) = run.sub_run().batch_complete(["x"], model="m")
            assert isinstance(result, BudgetExhausted)
            assert refused.value.code == "run_budget_exhausted"
            assert len(upstream.bodies) == sent


def test_prompts_count_against_a_budget_of_tokens(client: Client, upstream: Upstream) -> None:
    prompt = "word " * 100
    with client.run(token_budget=200) as run:
        used = [run.complete(prompt, model="m").usage for _ in range(2)]
        assert sum(one.output_tokens for one in used) < 200 <= sum(one.prompt_tokens for one in used)
        assert used[1].cached_tokens, "cached prompt tokens count too"
        with pytest.raises(BudgetExhausted):
            run.complete(prompt, model="m")


def test_a_tenants_budget_is_the_gateways(tmp_path: Path) -> None:
    config = {"tenants": {"small": {"run_token_ceiling": 8}}}
    with ScriptedModelGateway(tmp_path, config) as gateway, Client(gateway.url, api_key=gateway.key("small")) as client:
        with pytest.raises(CallError) as refused, client.run() as run:
            for _ in range(9):
                run.complete(HELLO, model="m", max_tokens=4)
        assert isinstance(refused.value, BudgetExhausted)
        assert refused.value.status == 402
