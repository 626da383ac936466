"""The contract of a Worker, for every implementation and the fake.

Tests that need vLLM are marked and run by `make test-vllm`, those that need another engine by `make test-engines`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from contracts.worker_calls import Received, a_plan, a_prompt, receive, text_after, until_ready, where_text_is_out
from contracts.worker_setups import (
    WorkerSetup,
    embedded,
    llamacpp_over_http,
    on_ray,
    over_http,
    python_function,
    remote,
    remote_over_http,
    scripted,
    transformers_over_http,
    vllm_in_process,
    vllm_over_http,
)
from inferry.domain.errors import ClientClosed, ContextLengthExceeded, InvalidRequest, NoWorker, WorkerLost
from inferry.domain.jobs import ResumeMode, ResumePoint
from inferry.domain.streams import Done, Failed, FinishReason
from inferry.domain.values import replace
from inferry.domain.workers import Phase
from support.contract_model import SPOKEN, ensure_contract_model

SHARING_KINDS = [scripted, over_http, embedded, remote, remote_over_http, python_function]
VLLM_KINDS = [
    pytest.param(make, marks=[pytest.mark.vllm, pytest.mark.timeout(600)]) for make in (vllm_over_http, vllm_in_process)
]
OTHER_ENGINES = [
    pytest.param(make, marks=[pytest.mark.engines, pytest.mark.timeout(600)])
    for make in (transformers_over_http, llamacpp_over_http)
]
KINDS = [*SHARING_KINDS, on_ray, *VLLM_KINDS, *OTHER_ENGINES]


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerSetup]:
    model = ensure_contract_model(tmp_path_factory.getbasetemp() / "contract-model")
    with ExitStack() as stack:
        yield stack.enter_context(request.param(model, tmp_path_factory.mktemp("contract")))


@pytest.fixture
def streams_tokens(setup: WorkerSetup) -> None:
    """For tests of what happens between the first token and the last."""
    if setup.whole:
        pytest.skip("its answers come whole, without token ids")


@pytest.fixture
def knows_ids(setup: WorkerSetup) -> None:
    """For tests with token ids."""
    if not setup.ids:
        pytest.skip("it says no token ids")


streams_tokens_only = pytest.mark.usefixtures("streams_tokens")
with_ids_only = pytest.mark.usefixtures("knows_ids")


# -- streams ---------------------------------------------------------------------------------------------------------


def test_every_job_of_a_plan_gets_contiguous_deltas_and_one_end(setup: WorkerSetup) -> None:
    jobs = [setup.call(f"j{i}", tokens=3 + i, prompt=a_prompt(4 + i)) for i in range(6)]
    received = setup.run(receive(setup.worker, *jobs))
    assert set(received.ends) == {job.job_id for job in jobs}
    for job in jobs:
        assert received.deltas[job.job_id]
        for delta in received.deltas[job.job_id]:
            assert (delta.run_id, delta.step_id) == (job.run_id, job.step_id)


@streams_tokens_only
def test_usage_counts_what_was_sent_and_received(setup: WorkerSetup) -> None:
    jobs = [setup.call(f"j{i}", tokens=3 + i, prompt=a_prompt(4 + i)) for i in range(6)]
    received = setup.run(receive(setup.worker, *jobs))
    for i, job in enumerate(jobs):
        done = received.done(job.job_id)
        assert done.finish is FinishReason.LENGTH
        counted = received.counted(job.job_id)
        # Events are counted by their text, and one may stand for more or less than a token.
        assert counted == 3 + i or (received.deltas[job.job_id][0].raw and 1 <= counted <= 3 + i)
        assert done.usage.output_tokens == (3 + i if setup.reports_usage else counted)
        if setup.ids:
            assert len(received.ids(job.job_id)) == 3 + i
        if setup.context is not None and setup.reports_usage:  # the fake counts what it was told
            assert done.usage.prompt_tokens == setup.prompt_tokens(a_prompt(4 + i))
        assert done.usage.gpu_seconds is None or done.usage.gpu_seconds >= 0


def test_the_first_item_is_a_token(setup: WorkerSetup) -> None:
    received = setup.run(receive(setup.worker, setup.call("j", tokens=3)))
    assert received.deltas["j"][0].tokens >= 1


def test_plans_run_side_by_side(setup: WorkerSetup) -> None:
    async def scenario() -> Received:
        received = Received()
        plans = [a_plan(setup.worker, setup.call(f"p{i}-a"), setup.call(f"p{i}-b")) for i in range(4)]
        await asyncio.gather(*(setup.worker.run(plan, received) for plan in plans))
        return received

    received = setup.run(scenario())
    assert len(received.ends) == 8
    assert all(isinstance(end, Done) for end in received.ends.values())
    assert len({(received.ids(job_id), received.text(job_id)) for job_id in received.ends}) == 1


def test_a_greedy_call_has_the_same_output_alone_and_in_a_batch(setup: WorkerSetup) -> None:
    alone = setup.run(receive(setup.worker, setup.call("j", tokens=20, prompt=a_prompt(9))))
    others = [setup.call(f"other-{i}", tokens=20, prompt=a_prompt(3 + 7 * i, 60 + i)) for i in range(7)]
    together = setup.run(receive(setup.worker, *others, setup.call("j", tokens=20, prompt=a_prompt(9))))
    assert alone.ids("j") == together.ids("j")
    assert alone.text("j") == together.text("j")


def test_a_character_of_several_tokens_is_delivered_complete(setup: WorkerSetup) -> None:
    if not setup.encodes:
        pytest.skip("it writes what the test says")
    prompt = (*a_prompt(4), *setup.encodes)
    tokens = 3 * len(setup.encodes)
    received = setup.run(receive(setup.worker, setup.call("j", tokens=tokens, prompt=prompt)))
    assert received.ids("j") == (setup.encodes * 3 if setup.ids else ())
    assert received.text("j") == SPOKEN * 3
    assert all("\ufffd" not in text for text, _ in received.pieces("j"))


def test_output_ends_before_a_stop_string(setup: WorkerSetup) -> None:
    if not setup.stops:
        pytest.skip("it knows no stop strings")
    free = setup.run(receive(setup.worker, setup.call("free", tokens=24)))
    half = len(free.text("free")) // 2
    stop = free.text("free")[half : half + 4]
    received = setup.run(receive(setup.worker, setup.call("j", tokens=24, stop=(stop,))))
    assert received.done("j").finish is FinishReason.STOP
    assert received.text("j") == free.text("free").partition(stop)[0]
    assert received.done("j").usage.output_tokens < 24


# -- the view --------------------------------------------------------------------------------------------------------


def test_a_worker_is_ready_after_its_start_and_names_its_models(setup: WorkerSetup) -> None:
    view = setup.worker.view()
    assert view.phase is Phase.READY
    assert view.worker == setup.worker.name
    assert view.models == {"m"} == {card.name for card in setup.worker.cards()}
    assert (view.capacity.sequences is not None) is setup.limited
    assert all(card.can_resume is setup.ids for card in setup.worker.cards())
    if setup.context is not None:
        assert [card.context_tokens for card in setup.worker.cards()] == [setup.context]


def test_a_prompt_that_is_too_long_fails_alone(setup: WorkerSetup) -> None:
    if setup.context is None:
        pytest.skip("its contexts have no end")
    jobs = [setup.call("long", prompt=(30, 21) * setup.context), setup.call("short")]
    received = setup.run(receive(setup.worker, *jobs))
    assert isinstance(received.failed("long").error, ContextLengthExceeded | InvalidRequest)
    assert not received.deltas["long"]
    assert setup.wrote(received.done("short"), 8)


# -- cancelling ------------------------------------------------------------------------------------------------------


@streams_tokens_only
def test_a_cancelled_job_ends_once_and_its_neighbours_continue(setup: WorkerSetup) -> None:
    async def scenario() -> tuple[Received, frozenset[str]]:
        received = Received()
        jobs = [setup.call("gone", tokens=setup.long), setup.call("stays", tokens=12)]
        running = asyncio.create_task(setup.worker.run(a_plan(setup.worker, *jobs), received))
        await received.first.wait()
        freed = await setup.worker.cancel(["gone"])
        await running
        return received, freed

    received, freed = setup.run(scenario())
    assert freed == ({"gone"} if setup.confirms else frozenset())
    assert isinstance(received.failed("gone").error, ClientClosed)
    assert setup.wrote(received.done("stays"), 12)


@pytest.mark.parametrize("companions", [0, 2])
def test_a_job_may_be_cancelled_before_its_first_token(setup: WorkerSetup, companions: int) -> None:
    others = [setup.call(f"other-{i}") for i in range(companions)]

    async def scenario() -> tuple[Received, frozenset[str]]:
        received = Received()
        plan = a_plan(setup.worker, setup.call("gone", tokens=setup.long), *others)
        running = asyncio.create_task(setup.worker.run(plan, received))
        cancelling = asyncio.create_task(setup.worker.cancel(["gone"]))
        await running
        return received, await cancelling

    received, freed = setup.run(scenario())
    assert freed == {"gone"} or (not setup.confirms and not freed)
    assert isinstance(received.failed("gone").error, ClientClosed)
    assert all(isinstance(received.ends[other.job_id], Done) for other in others)


def test_cancelling_an_unknown_job_frees_nothing(setup: WorkerSetup) -> None:
    assert setup.run(setup.worker.cancel(["nobody"])) == frozenset()
    setup.run(receive(setup.worker, setup.call("over")))
    assert setup.run(setup.worker.cancel(["over"])) == frozenset()


@streams_tokens_only
def test_cancelling_twice_at_once_ends_a_job_once(setup: WorkerSetup) -> None:
    async def scenario() -> Received:
        received = Received()
        running = asyncio.create_task(
            setup.worker.run(a_plan(setup.worker, setup.call("gone", tokens=setup.long)), received)
        )
        await received.first.wait()
        await asyncio.gather(setup.worker.cancel(["gone"]), setup.worker.cancel(["gone"]))
        await running
        return received

    assert isinstance(setup.run(scenario()).failed("gone").error, ClientClosed)


# -- resuming on another worker --------------------------------------------------------------------------------------


LENGTH = 40


def test_a_worker_that_says_no_ids_refuses_to_resume(setup: WorkerSetup) -> None:
    if setup.ids or setup.whole:
        pytest.skip("it resumes, or its answers come whole")
    resume_point = ResumePoint(a_prompt(4), (7, 8))
    received = setup.run(receive(setup.worker, setup.call("rest", resume_point=resume_point)))
    error = received.failed("rest").error
    assert isinstance(error, NoWorker)
    assert "cannot resume from token ids" in error.message


@with_ids_only
@pytest.mark.parametrize("cut", [1, 7, 20, LENGTH - 1])
def test_a_resumed_job_has_the_same_output_as_an_undisturbed_one(setup: WorkerSetup, cut: int) -> None:
    prompt = a_prompt(11)
    whole = setup.run(receive(setup.worker, setup.call("whole", tokens=LENGTH, prompt=prompt)))
    cut = where_text_is_out(whole, cut)
    resume_point = ResumePoint(prompt, whole.ids("whole")[:cut])
    rest = setup.run(receive(setup.worker, setup.call("rest", tokens=LENGTH, prompt=prompt, resume_point=resume_point)))
    assert rest.ids("rest") == whole.ids("whole")[cut:]
    assert text_after(whole, cut) == rest.text("rest")
    assert not any(delta.raw for delta in rest.deltas["rest"])
    done = rest.done("rest")
    assert done.finish is FinishReason.LENGTH
    assert done.usage.output_tokens == LENGTH - cut


@with_ids_only
def test_a_job_interrupted_after_its_last_token_is_done(setup: WorkerSetup) -> None:
    prompt = a_prompt(11)
    whole = setup.run(receive(setup.worker, setup.call("whole", tokens=12, prompt=prompt)))
    resume_point = ResumePoint(prompt, whole.ids("whole"))
    rest = setup.run(receive(setup.worker, setup.call("rest", tokens=12, prompt=prompt, resume_point=resume_point)))
    assert not rest.ids("rest")
    assert rest.done("rest").usage.output_tokens == 0


@with_ids_only
def test_a_stopped_job_reports_its_resume_point(setup: WorkerSetup) -> None:
    prompt = a_prompt(13)
    whole = setup.run(receive(setup.worker, setup.call("whole", tokens=setup.long, prompt=prompt)))

    async def stopped() -> Received:
        received = Received()
        job = setup.call("j", tokens=setup.long, prompt=prompt)
        running = asyncio.create_task(setup.worker.run(a_plan(setup.worker, job), received))
        await received.first.wait()
        await setup.worker.cancel(["j"])
        await running
        return received

    received = setup.run(stopped())
    resume_point = received.failed("j").resume_point
    assert resume_point is not None
    if setup.context is not None:
        assert resume_point.prompt_ids == prompt
    assert resume_point.output_ids == whole.ids("whole")[: len(resume_point.output_ids)]
    assert 1 <= len(resume_point.output_ids) <= len(received.ids("j"))
    rest = setup.run(
        receive(setup.worker, setup.call("rest", tokens=setup.long, prompt=prompt, resume_point=resume_point))
    )
    assert resume_point.output_ids + rest.ids("rest") == whole.ids("whole")
    assert received.text("j") + rest.text("rest") == whole.text("whole")


@with_ids_only
@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 12])
def test_a_job_stopped_within_a_character_resumes_before_it(setup: WorkerSetup, tokens: int) -> None:
    if not setup.encodes:
        pytest.skip("it writes what the test says")
    prompt, rounds = (*a_prompt(4), *setup.encodes), setup.long // len(setup.encodes)
    job = setup.call("j", tokens=rounds * len(setup.encodes), prompt=prompt)

    async def stopped() -> Received:
        received = Received()
        running = asyncio.create_task(setup.worker.run(a_plan(setup.worker, job), received))
        while len(received.ids("j")) < tokens:
            await asyncio.sleep(0.002)
        await setup.worker.cancel(["j"])
        await running
        return received

    received = setup.run(stopped())
    for _ in range(100):
        # A server that has fallen behind joins what it has in one event: then only it knows whose text is out. And it
        # may have finished before it was stopped.
        if isinstance(received.ends["j"], Failed) and all(len(ids) == 1 for _, ids in received.pieces("j")):
            break
        received = setup.run(stopped())
    resume_point = received.failed("j").resume_point
    assert resume_point is not None
    rest = setup.run(receive(setup.worker, replace(job, job_id="rest", resume_point=resume_point)))
    assert resume_point.output_ids + rest.ids("rest") == setup.encodes * rounds
    assert received.text("j") + rest.text("rest") == SPOKEN * rounds


@streams_tokens_only
def test_a_job_that_may_not_resume_reports_no_resume_point(setup: WorkerSetup) -> None:
    async def scenario() -> Received:
        received = Received()
        job = setup.call("j", tokens=setup.long, resume=ResumeMode.RESTART)
        running = asyncio.create_task(setup.worker.run(a_plan(setup.worker, job), received))
        await received.first.wait()
        await setup.worker.cancel(["j"])
        await running
        return received

    tries = (setup.run(scenario()) for _ in range(3))  # the engine may be faster than the cancellation
    assert next(one for one in tries if not isinstance(one.ends["j"], Done)).failed("j").resume_point is None


# -- ends ------------------------------------------------------------------------------------------------------------


@streams_tokens_only
def test_a_killed_engine_restarts(setup: WorkerSetup) -> None:
    kill = setup.kill
    if kill is None:
        pytest.skip("nothing computes behind it")
    whole = setup.run(receive(setup.worker, setup.call("whole", tokens=setup.long)))

    async def scenario() -> Received:
        received = Received()
        jobs = [setup.call("j", tokens=setup.long), setup.call("fixed", tokens=setup.long, resume=ResumeMode.RESTART)]
        running = asyncio.create_task(setup.worker.run(a_plan(setup.worker, *jobs), received))
        await received.first_or_end(running)
        await asyncio.to_thread(kill)
        await running
        await asyncio.to_thread(setup.revive)
        await until_ready(setup.worker)
        return received

    for _ in range(3):
        received = setup.run(scenario(), 500)
        if not isinstance(received.ends["j"], Done):
            break  # else it was faster than who came to kill it
    lost = received.failed("j")
    assert isinstance(lost.error, WorkerLost)
    assert received.failed("fixed").resume_point is None
    if not setup.ids:
        assert lost.resume_point is None
        again = setup.run(receive(setup.worker, setup.call("again", tokens=setup.long)))
        assert again.text("again") == whole.text("whole")
        return
    assert lost.resume_point is not None
    rest = setup.run(receive(setup.worker, setup.call("rest", tokens=setup.long, resume_point=lost.resume_point)))
    assert lost.resume_point.output_ids + rest.ids("rest") == whole.ids("whole")


@streams_tokens_only
def test_closing_ends_running_jobs_with_an_error(setup: WorkerSetup) -> None:
    async def scenario() -> None:
        async with setup.make_worker() as worker:
            await worker.start()
            received = Received()
            running = asyncio.create_task(worker.run(a_plan(worker, setup.call("j", tokens=setup.long)), received))
            await received.first.wait()
            await worker.close()
            await asyncio.wait([running])
            assert running.exception() is not None or isinstance(received.ends["j"], Failed)

    setup.run(scenario(), 500)
