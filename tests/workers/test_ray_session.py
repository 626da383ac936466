"""The gateway's session with a replica: order of messages, and the keys that the engine holds."""

from inferry.domain.sampling import Sampling
from inferry.engine.messages import (
    Abort,
    Aborted,
    Account,
    Add,
    End,
    Rejected,
    Request,
    Stats,
    StepDone,
    frame,
)
from inferry.workers.ray.session import Session

STATS = Stats(1, 0, 0, 0, 0)


def add(*keys: int) -> Add:
    return Add([Request(key, [1], Sampling(), 1) for key in keys])


def test_batches_that_arrive_out_of_order_are_taken_in_order() -> None:
    session = Session("s", 0.0)
    assert session.received(1, frame(Abort(1, [7])), 1.0) == []
    messages = session.received(0, frame(add(7)), 2.0)
    assert [type(message) for message in messages] == [Add, Abort]
    assert session.keys == {7}
    assert session.heard_at == 2.0


def test_a_message_may_be_split_over_two_batches() -> None:
    session, data = Session("s", 0.0), frame(add(1, 2))
    assert session.received(0, data[:5], 0.0) == []
    assert len(session.received(1, data[5:], 0.0)) == 1
    assert session.keys == {1, 2}


def test_an_empty_batch_is_a_sign_of_life() -> None:
    session = Session("s", 0.0)
    assert session.received(0, b"", 4.0) == []
    assert session.heard_at == 4.0


def test_keys_are_free_after_their_end_abort_or_refusal() -> None:
    session = Session("s", 0.0)
    session.received(0, frame(add(1, 2, 3, 4)), 0.0)
    session.sent(StepDone([(4, 9)], [End(Account(1, 1, 1, 0.0), True)], STATS))
    session.sent(Aborted(1, [Account(2, 1, 1, 0.0)], STATS))
    session.sent(Rejected(3, False, "no"))
    assert session.keys == {4}
