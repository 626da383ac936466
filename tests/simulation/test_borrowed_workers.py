"""Borrowed workers in the gateway in virtual time: how long a live call waits for the jobs that borrowed them."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.sim.costs import CostModel
from inferry.streams.mailbox import JobStream
from support.staging.engines import ContinuousWorker
from support.virtual_gateway import a_virtual_gateway
from support.virtual_time import run_virtual

SEQUENCES = 8
LARGE = CostModel(base_s=0.04, prefill_token_s=150e-6, sequence_s=2e-4, kv_token_s=1e-8)
"""A large model: 40 ms per step."""
ABORT_S = 0.3
"""An abort that reaches a busy server late: several steps of a large model, and a connection of its own."""
YIELD_S = 1.0
LIVE_LANES = (Lane.P0, Lane.P1)
LANES = {
    **{lane: replace(DEFAULT_LANES[lane], groups=("interactive",)) for lane in LIVE_LANES},
    Lane.P2: replace(DEFAULT_LANES[Lane.P2], groups=("batch",), borrow_groups=True, reserve=0.0),
}


class LateWorker(ContinuousWorker):
    """Its aborts take `ABORT_S` until the engine stops the sequences and confirms."""

    async def cancel(self, job_ids: Iterable[str]) -> frozenset[str]:
        await asyncio.sleep(ABORT_S)
        return await super().cancel(job_ids)


async def first_token(stream: JobStream) -> None:
    """Read until there is output."""
    delta, end = None, None
    while delta is None and end is None:
        delta, end = await stream.take()
    assert delta is not None


@pytest.mark.parametrize("lane", LIVE_LANES)
def test_batch_jobs_yield_borrowed_workers_within_a_second_of_the_first_live_call(lane: Lane) -> None:
    async def main() -> tuple[float, float]:
        batch, interactive = (
            LateWorker(group, group=group, costs=LARGE, max_sequences=SEQUENCES) for group in ("batch", "interactive")
        )
        async with a_virtual_gateway(batch, interactive, lanes=LANES) as env:
            job: dict[str, Any] = {"output": 20_000}
            for _ in range(3 * SEQUENCES):
                env.submit(lane=Lane.P2, **job)
            await env.until(lambda: batch.engine.running == interactive.engine.running == SEQUENCES, 20.0)
            arrived_at = env.clock.now()
            live = env.submit(lane=lane, stream=True, **job)
            await first_token(live)
            first_token_s = env.clock.now() - arrived_at
            await env.until(lambda: interactive.engine.running == 1, 20.0)
            yielded_s = env.clock.now() - arrived_at
            # Nothing is borrowed again while a live call runs, and the batch worker has kept its jobs.
            await asyncio.sleep(2.0)
            assert (batch.engine.running, interactive.engine.running) == (SEQUENCES, 1)
            env.gateway.abandon()
            return first_token_s, yielded_s

    first_token_s, yielded_s = run_virtual(main())
    assert ABORT_S <= yielded_s < YIELD_S
    assert first_token_s < YIELD_S
