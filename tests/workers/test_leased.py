"""A worker of a domain sends while its gateway owns the domain, also after the lease has ended and begun again."""

from collections.abc import Callable

from inferry.workers.leased import lease
from support.scripted_worker import ScriptedWorker


class GuardedWorker(ScriptedWorker):
    """One that asks again right before it sends, as HTTP workers do."""

    may_send: Callable[[], bool] = staticmethod(lambda: True)


def test_an_owner_that_owns_its_workers_again_lets_them_send() -> None:
    worker = GuardedWorker()
    leased = lease(worker, lambda: False)  # of an epoch that is over
    assert not worker.may_send()
    leased.may_send = lambda: True  # of the next one
    assert worker.may_send()
    leased.may_send = lambda: False
    assert not worker.may_send()
