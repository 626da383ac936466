"""Six further situations whose causes were written down before the diagnosis had seen them.

Four were right at first. The herd was named overload, since the diagnosis knew no bursts. The documents were named
decode_bound before causes inside the engine were ordered by the lateness that they explain.
"""

import asyncio
from pathlib import Path

import pytest

from inferry.domain.workers import Phase
from inferry.sim.costs import CostModel
from support.staging.engines import ContinuousWorker
from support.staging.situations import Situation
from support.staging.stage import Stage, with_stage


async def _out_of_quota(stage: Stage) -> None:
    loop = asyncio.get_running_loop()

    async def importer() -> None:
        for _ in range(10):
            began = loop.time()
            await stage.call(tenant="import", prompt=(1500, 2500), output=(80, 120))
            if loop.time() > began:
                return
            await asyncio.sleep(1.0)

    stage.start(stage.arrivals(3, 150, tenant="shop", lane="P0", prompt=(200, 600), output=(40, 80)))
    for _ in range(150):
        stage.start(importer())
        await asyncio.sleep(1.0)


OUT_OF_QUOTA = Situation(
    # 60 calls of 2,100 tokens a minute are wanted. A refused one is sent again every second, ten times at most.
    "a tenant out of quota that retries",
    "quota_too_tight",
    lambda: [ContinuousWorker()],
    _out_of_quota,
    {"tenants": {"import": {"tokens_per_minute": 60_000}, "shop": {"tokens_per_minute": 500_000}}},
)


def _costs(times: float) -> CostModel:
    return CostModel(
        base_s=0.016 * times, prefill_token_s=30e-6 * times, sequence_s=50e-6 * times, kv_token_s=4e-9 * times
    )


async def _steady(stage: Stage) -> None:
    await stage.arrivals(9, 120, prompt=(600, 1400), output=(100, 200))


HOT_GPU = Situation(
    # One of three GPUs is too hot and runs at a lower clock: 56 ms per token where the others take 16.
    "one worker slower than the others",
    "slow_worker",
    lambda: [ContinuousWorker(f"gpu-{number}", costs=_costs(3.5 if number == 2 else 1.0)) for number in range(3)],
    _steady,
    {},
)


async def _every_minute(stage: Stage) -> None:
    stage.start(stage.arrivals(1, 240, prompt=(300, 900), output=(60, 120)))
    for _ in range(4):
        for _ in range(240):
            stage.start(stage.call(tenant="cron", prompt=(1000, 2000), output=(100, 200)))
        await asyncio.sleep(60)


HERD = Situation(
    # All timers fire at the full minute: 12 s of work arrive at once, and the engine idles for the rest of the minute.
    "a thundering herd every minute",
    "bursts",
    lambda: [ContinuousWorker(max_sequences=64)],
    _every_minute,
    {},
)


async def _documents(stage: Stage) -> None:
    stage.start(stage.arrivals(0.4, 150, tenant="archive", prompt=(50_000, 70_000), output=(100, 200)))
    await stage.arrivals(4, 150, tenant="chat", prompt=(200, 600), output=(60, 120))


DOCUMENTS = Situation(
    # A document takes 1.5 s of prefill, and 60% of the engine goes into documents: short prompts wait behind them.
    "short prompts behind long ones",
    "prefill_bound",
    lambda: [ContinuousWorker()],
    _documents,
    {},
)


async def _phones(stage: Stage) -> None:
    stage.start(stage.arrivals(1, 120, lane="P0", tenant="phones", output=(300, 400), read_every_s=3.0))
    stage.start(stage.arrivals(1, 120, lane="P2", tenant="nightly", prompt=(1000, 2000), output=(100, 200)))
    await stage.arrivals(3, 120, tenant="shop", prompt=(300, 900), output=(60, 120))


PHONES = Situation(
    # Phones on a bad network take what has arrived every three seconds.
    "clients that read slowly",
    "slow_reader",
    lambda: [ContinuousWorker()],
    _phones,
    {},
)


async def _deploy(stage: Stage) -> None:
    (worker,) = stage.workers
    stage.start(stage.arrivals(4, 180, prompt=(300, 900), output=(60, 120)))
    await asyncio.sleep(40)
    worker.phase = Phase.STARTING
    await asyncio.sleep(50)
    worker.phase = Phase.READY
    await asyncio.sleep(90)


DEPLOY = Situation(
    # The engine was replaced while calls came in, and loaded its weights for 50 s. It serves again, all others waited.
    "a cold start after a deploy",
    "dead_worker",
    lambda: [ContinuousWorker()],
    _deploy,
    {},
)


@pytest.mark.parametrize(
    "situation", [OUT_OF_QUOTA, HOT_GPU, HERD, DOCUMENTS, PHONES, DEPLOY], ids=lambda one: one.name
)
def test_the_diagnosis_names_the_cause_of_a_later_situation(situation: Situation, tmp_path: Path) -> None:
    found = with_stage(tmp_path, situation.workers, situation.play, **situation.config)

    assert (found.verdict, found.cause) == ("problem", situation.cause), [one.cause for one in found.findings]
