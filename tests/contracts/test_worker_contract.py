"""The laws of a Worker, held by every implementation and by the fake.

Those that need vLLM are marked so and run by `make test-vllm`.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from contracts.homes import Home, embedded, over_http, scripted, vllm_in_process, vllm_over_http
from inferry.domain.errors import ClientClosed, ContextLengthExceeded, InvalidRequest, WorkerLost
from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload, Resume, SoFar
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Worker
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.domain.streams import Delta, Done, End, Failed, FinishReason, Item
from inferry.domain.values import replace
from inferry.domain.workers import Phase
from support.contract_model import SPOKEN, ensure_contract_model

KINDS = [scripted, over_http, embedded]
VLLM_KINDS = [
    pytest.param(make, marks=[pytest.mark.vllm, pytest.mark.timeout(600)]) for make in (vllm_over_http, vllm_in_process)
]


@pytest.fixture(scope="module", params=[*KINDS, *VLLM_KINDS], ids=lambda make: make.__name__)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    model = ensure_contract_model(tmp_path_factory.getbasetemp() / "contract-model")
    with ExitStack() as stack:
        yield stack.enter_context(request.param(model, tmp_path_factory.mktemp("contract")))


class Heard:
    """Everything a worker emitted, checked for order as it comes."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.ends: dict[str, End] = {}
        self.first = asyncio.Event()

    def __call__(self, item: Item) -> None:
        assert item.job_id not in self.ends, "nothing comes after the end"
        if isinstance(item, Delta):
            assert item.index == len(self.deltas[item.job_id]), "indexes are contiguous"
            self.deltas[item.job_id].append(item)
            if item.tokens:
                self.first.set()
        else:
            self.ends[item.job_id] = item

    def counted(self, job_id: str) -> int:
        return sum(delta.tokens for delta in self.deltas[job_id])

    def pieces(self, job_id: str) -> list[tuple[str, tuple[int, ...]]]:
        """Text and token ids of each delta, whether it brings them itself or in events."""
        return [_read(delta) for delta in self.deltas[job_id]]

    def text(self, job_id: str) -> str:
        return "".join(text for text, _ in self.pieces(job_id))

    def ids(self, job_id: str) -> tuple[int, ...]:
        return tuple(token for _, ids in self.pieces(job_id) for token in ids)

    def failed(self, job_id: str) -> Failed:
        end = self.ends[job_id]
        assert isinstance(end, Failed)
        return end

    def done(self, job_id: str) -> Done:
        end = self.ends[job_id]
        assert isinstance(end, Done), end
        return end


def _read(delta: Delta) -> tuple[str, tuple[int, ...]]:
    if not delta.raw:
        return delta.text, delta.token_ids
    events = [json.loads(event.removeprefix(b"data: ")) for event in delta.raw.split(b"\n\n") if event]
    choices = [choice for event in events for choice in event["choices"]]
    ids = tuple(token for choice in choices for token in choice["token_ids"] or ())
    return "".join(choice["text"] for choice in choices), ids


def a_prompt(tokens: int = 5, begin: int = 20) -> tuple[int, ...]:
    return tuple(range(begin, begin + tokens))


def a_call(
    job_id: str,
    *,
    tokens: int = 8,
    prompt: tuple[int, ...] | None = None,
    stop: tuple[str, ...] = (),
    so_far: SoFar | None = None,
    resume: Resume = Resume.CONTINUE,
) -> InferenceJob:
    """A greedy call of /v1/completions that says how many tokens it wants, and that it wants to see their ids."""
    route = RouteKey("m")
    ids = a_prompt() if prompt is None else prompt
    body = {"model": "m", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | ({"stop": stop} if stop else {})
    return InferenceJob(
        job_id=job_id,
        tenant="a",
        run_id=f"run-{job_id}",
        step_id=f"step-{job_id}",
        lane=Lane.P1,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(Estimate.exactly(len(ids)), Estimate.exactly(0), Estimate.exactly(tokens)),
        token_budget=tokens,
        prompt_hash="",
        arrived_at=0.0,
        max_wait_s=1.0,
        resume=resume,
        so_far=so_far,
        payload=Payload(
            api="completions",
            body=msgspec.json.encode(body),
            sampling=Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, stop=stop),
            prompt_ids=ids,
        ),
    )


def a_plan(worker: Worker, *jobs: InferenceJob) -> BatchPlan:
    return BatchPlan(plan_id=1, worker=worker.name, jobs=jobs, reason=ReleaseReason.IMMEDIATE, formed_at=0.0)


async def hear(worker: Worker, *jobs: InferenceJob) -> Heard:
    heard = Heard()
    await worker.run(a_plan(worker, *jobs), heard)
    return heard


async def until_ready(worker: Worker) -> None:
    while worker.view().phase is not Phase.READY:
        await asyncio.sleep(0.05)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_every_job_of_a_plan_gets_contiguous_deltas_and_one_end(home: Home) -> None:
    jobs = [a_call(f"j{i}", tokens=3 + i, prompt=a_prompt(4 + i)) for i in range(6)]
    heard = home.run(hear(home.worker, *jobs))
    assert set(heard.ends) == {job.job_id for job in jobs}
    for job in jobs:
        assert heard.deltas[job.job_id]
        for delta in heard.deltas[job.job_id]:
            assert (delta.run_id, delta.step_id) == (job.run_id, job.step_id)


def test_usage_says_what_was_sent_and_what_came(home: Home) -> None:
    jobs = [a_call(f"j{i}", tokens=3 + i, prompt=a_prompt(4 + i)) for i in range(6)]
    heard = home.run(hear(home.worker, *jobs))
    for i, job in enumerate(jobs):
        done = heard.done(job.job_id)
        assert done.finish is FinishReason.LENGTH
        assert done.usage.output_tokens == 3 + i == len(heard.ids(job.job_id))
        counted = heard.counted(job.job_id)
        # Events are counted by their text, and one may stand for more or less than a token.
        assert counted == 3 + i or (heard.deltas[job.job_id][0].raw and 1 <= counted <= 3 + i)
        if home.context is not None:  # the fake counts what it was told
            assert done.usage.prompt_tokens == 4 + i
        assert done.usage.gpu_seconds is None or done.usage.gpu_seconds >= 0


def test_the_first_thing_to_come_is_a_token(home: Home) -> None:
    heard = home.run(hear(home.worker, a_call("j", tokens=3)))
    assert heard.deltas["j"][0].tokens >= 1


def test_plans_run_side_by_side(home: Home) -> None:
    async def scenario() -> Heard:
        heard = Heard()
        plans = [a_plan(home.worker, a_call(f"p{i}-a"), a_call(f"p{i}-b")) for i in range(4)]
        await asyncio.gather(*(home.worker.run(plan, heard) for plan in plans))
        return heard

    heard = home.run(scenario())
    assert len(heard.ends) == 8
    assert all(isinstance(end, Done) for end in heard.ends.values())
    assert len({heard.ids(job_id) for job_id in heard.ends}) == 1


def test_a_greedy_call_is_answered_alike_alone_and_in_company(home: Home) -> None:
    alone = home.run(hear(home.worker, a_call("j", tokens=20, prompt=a_prompt(9))))
    others = [a_call(f"other-{i}", tokens=20, prompt=a_prompt(3 + 7 * i, 60 + i)) for i in range(7)]
    together = home.run(hear(home.worker, *others, a_call("j", tokens=20, prompt=a_prompt(9))))
    assert alone.ids("j") == together.ids("j")
    assert alone.text("j") == together.text("j")


def test_a_character_of_several_tokens_comes_whole(home: Home) -> None:
    if not home.speaks:
        pytest.skip("it writes what the test says")
    prompt = (*a_prompt(4), *home.speaks)
    tokens = 3 * len(home.speaks)
    heard = home.run(hear(home.worker, a_call("j", tokens=tokens, prompt=prompt)))
    assert heard.ids("j") == home.speaks * 3
    assert heard.text("j") == SPOKEN * 3
    assert all("\ufffd" not in text for text, _ in heard.pieces("j"))


def test_output_ends_before_a_stop_string(home: Home) -> None:
    if not home.stops:
        pytest.skip("it writes what the test says")
    free = home.run(hear(home.worker, a_call("free", tokens=24)))
    half = len(free.text("free")) // 2
    stop = free.text("free")[half : half + 4]
    heard = home.run(hear(home.worker, a_call("j", tokens=24, stop=(stop,))))
    assert heard.done("j").finish is FinishReason.STOP
    assert heard.text("j") == free.text("free").partition(stop)[0]
    assert heard.done("j").usage.output_tokens < 24


# -- the view --------------------------------------------------------------------------------------------------------


def test_a_worker_is_ready_after_its_start_and_names_its_models(home: Home) -> None:
    view = home.worker.view()
    assert view.phase is Phase.READY
    assert view.worker == home.worker.name
    assert view.models == {"m"} == {card.name for card in home.worker.cards()}
    assert view.room.sequences is not None
    assert all(card.continues for card in home.worker.cards())
    if home.context is not None:
        assert [card.context_tokens for card in home.worker.cards()] == [home.context]


def test_a_prompt_that_is_too_long_fails_alone(home: Home) -> None:
    if home.context is None:
        pytest.skip("its contexts have no end")
    jobs = [a_call("long", prompt=(30,) * (home.context + 100)), a_call("short")]
    heard = home.run(hear(home.worker, *jobs))
    assert isinstance(heard.failed("long").error, ContextLengthExceeded | InvalidRequest)
    assert not heard.deltas["long"]
    assert heard.done("short").usage.output_tokens == 8


# -- cancelling ------------------------------------------------------------------------------------------------------


def test_a_cancelled_job_ends_once_and_its_neighbours_go_on(home: Home) -> None:
    async def scenario() -> tuple[Heard, frozenset[str]]:
        heard = Heard()
        jobs = [a_call("gone", tokens=home.long), a_call("stays", tokens=12)]
        running = asyncio.create_task(home.worker.run(a_plan(home.worker, *jobs), heard))
        await heard.first.wait()
        freed = await home.worker.cancel(["gone"])
        await running
        return heard, freed

    heard, freed = home.run(scenario())
    assert freed == {"gone"}
    assert isinstance(heard.failed("gone").error, ClientClosed)
    assert heard.done("stays").usage.output_tokens == 12


@pytest.mark.parametrize("companions", [0, 2])
def test_a_job_may_be_cancelled_before_anything_came(home: Home, companions: int) -> None:
    others = [a_call(f"other-{i}") for i in range(companions)]

    async def scenario() -> tuple[Heard, frozenset[str]]:
        heard = Heard()
        plan = a_plan(home.worker, a_call("gone", tokens=home.long), *others)
        running = asyncio.create_task(home.worker.run(plan, heard))
        cancelling = asyncio.create_task(home.worker.cancel(["gone"]))
        await running
        return heard, await cancelling

    heard, freed = home.run(scenario())
    assert freed == {"gone"}
    assert isinstance(heard.failed("gone").error, ClientClosed)
    assert all(isinstance(heard.ends[other.job_id], Done) for other in others)


def test_cancelling_what_is_not_there_frees_nothing(home: Home) -> None:
    assert home.run(home.worker.cancel(["nobody"])) == frozenset()
    home.run(hear(home.worker, a_call("over")))
    assert home.run(home.worker.cancel(["over"])) == frozenset()


def test_cancelling_twice_at_once_ends_a_job_once(home: Home) -> None:
    async def scenario() -> Heard:
        heard = Heard()
        running = asyncio.create_task(home.worker.run(a_plan(home.worker, a_call("gone", tokens=home.long)), heard))
        await heard.first.wait()
        await asyncio.gather(home.worker.cancel(["gone"]), home.worker.cancel(["gone"]))
        await running
        return heard

    assert isinstance(home.run(scenario()).failed("gone").error, ClientClosed)


# -- going on elsewhere ----------------------------------------------------------------------------------------------

LENGTH = 40


@pytest.mark.parametrize("cut", [1, 7, 20, LENGTH - 1])
def test_a_job_that_goes_on_writes_what_it_would_have_written(home: Home, cut: int) -> None:
    prompt = a_prompt(11)
    whole = home.run(hear(home.worker, a_call("whole", tokens=LENGTH, prompt=prompt)))
    cut = _where_text_is_out(whole, cut)
    so_far = SoFar(prompt, whole.ids("whole")[:cut])
    rest = home.run(hear(home.worker, a_call("rest", tokens=LENGTH, prompt=prompt, so_far=so_far)))
    assert rest.ids("rest") == whole.ids("whole")[cut:]
    assert _text_after(whole, cut) == rest.text("rest")
    assert not any(delta.raw for delta in rest.deltas["rest"])
    done = rest.done("rest")
    assert done.finish is FinishReason.LENGTH
    assert done.usage.output_tokens == LENGTH - cut


def test_a_job_that_broke_off_at_its_very_end_has_nothing_left_to_write(home: Home) -> None:
    prompt = a_prompt(11)
    whole = home.run(hear(home.worker, a_call("whole", tokens=12, prompt=prompt)))
    so_far = SoFar(prompt, whole.ids("whole"))
    rest = home.run(hear(home.worker, a_call("rest", tokens=12, prompt=prompt, so_far=so_far)))
    assert not rest.ids("rest")
    assert rest.done("rest").usage.output_tokens == 0


def test_a_job_that_is_stopped_says_where_to_go_on(home: Home) -> None:
    prompt = a_prompt(13)
    whole = home.run(hear(home.worker, a_call("whole", tokens=home.long, prompt=prompt)))

    async def stopped() -> Heard:
        heard = Heard()
        job = a_call("j", tokens=home.long, prompt=prompt)
        running = asyncio.create_task(home.worker.run(a_plan(home.worker, job), heard))
        await heard.first.wait()
        await home.worker.cancel(["j"])
        await running
        return heard

    heard = home.run(stopped())
    so_far = heard.failed("j").so_far
    assert so_far is not None
    if home.context is not None:
        assert so_far.prompt_ids == prompt
    assert so_far.output_ids == whole.ids("whole")[: len(so_far.output_ids)]
    assert 1 <= len(so_far.output_ids) <= len(heard.ids("j"))
    rest = home.run(hear(home.worker, a_call("rest", tokens=home.long, prompt=prompt, so_far=so_far)))
    assert so_far.output_ids + rest.ids("rest") == whole.ids("whole")
    assert heard.text("j") + rest.text("rest") == whole.text("whole")


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 12])
def test_a_job_that_is_stopped_within_a_character_goes_on_before_it(home: Home, tokens: int) -> None:
    if not home.speaks:
        pytest.skip("it writes what the test says")
    prompt, rounds = (*a_prompt(4), *home.speaks), home.long // len(home.speaks)
    job = a_call("j", tokens=rounds * len(home.speaks), prompt=prompt)

    async def stopped() -> Heard:
        heard = Heard()
        running = asyncio.create_task(home.worker.run(a_plan(home.worker, job), heard))
        while len(heard.ids("j")) < tokens:
            await asyncio.sleep(0.002)
        await home.worker.cancel(["j"])
        await running
        return heard

    heard = home.run(stopped())
    for _ in range(20):
        # A server that has fallen behind joins what it has in one event: then only it knows whose text is out.
        if all(len(ids) == 1 for _, ids in heard.pieces("j")):
            break
        heard = home.run(stopped())
    so_far = heard.failed("j").so_far
    assert so_far is not None
    rest = home.run(hear(home.worker, replace(job, job_id="rest", so_far=so_far)))
    assert so_far.output_ids + rest.ids("rest") == home.speaks * rounds
    assert heard.text("j") + rest.text("rest") == SPOKEN * rounds


def test_a_job_that_may_not_go_on_says_nothing_of_where(home: Home) -> None:
    async def scenario() -> Heard:
        heard = Heard()
        job = a_call("j", tokens=home.long, resume=Resume.RESTART)
        running = asyncio.create_task(home.worker.run(a_plan(home.worker, job), heard))
        await heard.first.wait()
        await home.worker.cancel(["j"])
        await running
        return heard

    assert home.run(scenario()).failed("j").so_far is None


def _where_text_is_out(heard: Heard, at_least: int) -> int:
    """The first place, at or after this many tokens, where no character is half written."""
    tokens = 0
    for text, ids in heard.pieces("whole"):
        tokens += len(ids)
        if tokens >= at_least and text:
            return tokens
    return tokens


def _text_after(heard: Heard, cut: int) -> str:
    tokens, rest = 0, ""
    for text, ids in heard.pieces("whole"):
        rest += text if tokens >= cut else ""
        tokens += len(ids)
    return rest


# -- ends ------------------------------------------------------------------------------------------------------------


def test_what_computes_may_be_killed_and_comes_back(home: Home) -> None:
    kill = home.kill
    if kill is None:
        pytest.skip("nothing computes behind it")
    whole = home.run(hear(home.worker, a_call("whole", tokens=home.long)))

    async def scenario() -> Heard:
        heard = Heard()
        jobs = [a_call("j", tokens=home.long), a_call("fixed", tokens=home.long, resume=Resume.RESTART)]
        running = asyncio.create_task(home.worker.run(a_plan(home.worker, *jobs), heard))
        await heard.first.wait()
        await asyncio.to_thread(kill)
        await running
        await asyncio.to_thread(home.revive)
        await until_ready(home.worker)
        return heard

    for _ in range(3):
        heard = home.run(scenario(), 500)
        if not isinstance(heard.ends["j"], Done):
            break  # else it was faster than who came to kill it
    lost = heard.failed("j")
    assert isinstance(lost.error, WorkerLost)
    assert lost.so_far is not None
    assert heard.failed("fixed").so_far is None
    rest = home.run(hear(home.worker, a_call("rest", tokens=home.long, so_far=lost.so_far)))
    assert lost.so_far.output_ids + rest.ids("rest") == whole.ids("whole")


def test_closing_ends_what_runs_with_an_error(home: Home) -> None:
    async def scenario() -> None:
        async with home.fresh() as worker:
            await worker.start()
            heard = Heard()
            running = asyncio.create_task(worker.run(a_plan(worker, a_call("j", tokens=home.long)), heard))
            await heard.first.wait()
            await worker.close()
            await asyncio.wait([running])
            assert running.exception() is not None or isinstance(heard.ends["j"], Failed)

    home.run(scenario(), 500)
