"""Runs one plan on one worker."""

import logging

from inferry.domain.errors import GatewayError, WorkerLost
from inferry.domain.plans import BatchPlan
from inferry.domain.ports import Emit, Worker
from inferry.streams.mailbox import StreamProtocolError

log = logging.getLogger(__name__)


async def run_plan(worker: Worker | None, plan: BatchPlan, emit: Emit) -> GatewayError | None:
    """Run the plan. Returns the error for those of its jobs that the worker did not end; None where it raised none."""
    name = plan.worker
    if worker is None:
        return WorkerLost(f"worker {name} is gone")
    try:
        await worker.run(plan, emit)
    except GatewayError as error:
        return error
    except StreamProtocolError as error:
        log.error("worker %s broke its contract: %s", name, error)
        return WorkerLost(f"worker {name} violated the stream protocol")
    except Exception:
        log.exception("worker %s failed", name)
        return WorkerLost(f"worker {name} failed")
    return None
