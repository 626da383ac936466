"""A gateway with two tenants, one of which has secrets, for tests of isolation."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import CHAT, Answer, TenantGateway, bearer
from support.waiting import until

WORD = "zanzibar"
"""In every secret of globex: prompts, run and step ids, labels, models."""


THEIRS = {"model": "m", "messages": [{"role": "user", "content": f"the plans for {WORD}"}], "temperature": 0}


CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


RUN = f"run-{WORD}"


STEP = f"step-{WORD}"


class House(TenantGateway):
    """A gateway with the two of them, globex with a run, a sub-run and a kept answer."""

    worker: ScriptedWorker
    clients: ThreadPoolExecutor

    def __init__(self, directory: Path, **config: Any) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
            self.worker = ScriptedWorker(models=("m", f"tuned-{WORD}"))
            return [self.worker], {}

        super().__init__(directory, make, config)

    def settle(self) -> None:
        self.acme, self.acme_too = self.key("acme"), self.key("acme")
        self.globex, self.globex_too = self.key("globex", label=WORD), self.key("globex")
        kept = {"idempotency_key": f"key-{WORD}", "x_inferry_replay": "allow"}
        first = self.ask(self.globex, THEIRS, x_inferry_run_id=RUN, x_inferry_step_id=STEP, **kept)
        self.ask(self.globex, THEIRS, x_inferry_run_id=f"{RUN}-sub", x_inferry_parent_run_id=RUN)
        self.job_id = first.headers["x-request-id"]

    def ask(self, key: str, body: Any = None, **headers: str) -> Answer:
        return self.call("POST", CHAT, CALL if body is None else body, bearer(key, **headers))

    @property
    def executions(self) -> int:
        return sum(len(plan.jobs) for plan in self.worker.plans)

    def hold(self, *, back: bool) -> None:
        async def act() -> None:
            if back:
                self.worker.gate.clear()
            else:
                self.worker.gate.set()

        self.run(act())

    def ask_later(self, key: str, body: Any = None, **headers: str) -> "Future[Answer]":
        """Returns once the gateway has the call."""
        before = self.metric("inferry_jobs_in_flight")
        asked = self.clients.submit(self.ask, key, body, **headers)
        until(lambda: self.metric("inferry_jobs_in_flight") > before)
        return asked

    def as_seen_by(self, key: str, method: str, path: str) -> Answer:
        return self.call(method, path, headers=bearer(key))


def told(answer: Answer) -> tuple[int, bytes, dict[str, str]]:
    """All that an answer says, but for the number that every one of them has of its own."""
    return answer.status, answer.body, {n: v for n, v in answer.headers.items() if n != "x-request-id"}
