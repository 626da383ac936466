"""Callers and jobs for tests about quotas and budgets."""

from typing import Any

from inferry.domain.callers import Caller
from inferry.domain.jobs import Estimate, Footprint, InferenceJob
from inferry.domain.streams import Usage
from inferry.domain.tenants import ApiKey, Limits, Tenant
from inferry.domain.values import replace
from support.builders import a_job

NOON = 1_773_576_000.0
"""Noon of a 15th of March, UTC."""
DAY = 86_400.0


def a_caller(
    tenant: str = "a", *, key: Limits | None = None, key_id: str = "k", shadow: bool = False, **limits: Any
) -> Caller:
    """A tenant with these limits, and with a key where that is given limits of its own."""
    api_key = None if key is None else ApiKey(key_id=key_id, tenant=tenant, secret_hash=b"", limits=key)
    return Caller(Tenant(name=tenant, limits=Limits(**limits), shadow=shadow), api_key)


def a_call(
    prompt: int = 10,
    output: int = 20,
    *,
    run: str = "run",
    model: str = "m",
    choices: int = 1,
    named: bool = True,
    predicted: int | None = None,
    prompt_high: int | None = None,
) -> InferenceJob:
    """A job whose prompt has so many tokens and that may write so many for each choice. Unless `named`, the client
    gave no limit and the budget is an assumption; `predicted` is then what it is taken to write at most."""
    job = a_job(tokens=prompt, output=output, run_id=run, model=model)
    high = output if predicted is None else predicted
    return replace(
        job,
        token_budget=output,
        footprint=Footprint(
            Estimate(prompt, prompt, prompt if prompt_high is None else prompt_high),
            Estimate.exactly(0),
            Estimate(1, high, high),
        ),
        payload=replace(job.payload, choices=choices, output_limit=(output if named else 100_000) * choices),
    )


def used(prompt: int = 10, output: int = 20, cached: int = 0) -> Usage:
    return Usage(prompt, cached, output)
