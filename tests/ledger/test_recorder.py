"""The recorder: no entry is lost, nothing blocks, and dropped entries are counted."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from inferry.domain.ledger import GpuTimeRow, LedgerEntry
from inferry.ledger import recorder as module
from inferry.ledger.recorder import Recorder
from ledger.builders import an_entry, entries

PATIENCE_S = 120.0
NEVER_S = 3600.0


class FakeLedger:
    """Keeps batches. It can be held at the gate and told to fail."""

    def __init__(self) -> None:
        self.batches: list[list[LedgerEntry]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.appended = threading.Event()
        self.fail: Callable[[Sequence[LedgerEntry]], Exception | None] = lambda _: None
        self.gpu_time: list[GpuTimeRow] = []
        self.calls = 0
        self.closed = 0

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if (error := self.fail(entries)) is not None:
            raise error
        self.batches.append(list(entries))
        self.appended.set()

    def append_gpu_time(self, rows: Sequence[GpuTimeRow]) -> None:
        self.gpu_time += rows

    def close(self) -> None:
        self.closed += 1

    @property
    def kept(self) -> list[LedgerEntry]:
        return [entry for batch in self.batches for entry in batch]


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
def make(ledger: FakeLedger) -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def recorder(**options: float) -> Recorder:
        made.append(Recorder(ledger, **options))  # type: ignore[arg-type]
        return made[-1]

    yield recorder
    ledger.gate.set()
    for one in made:
        one.close()


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INITIAL_RETRY_S", 0.0)


def failing_times(times: int) -> Callable[[Sequence[LedgerEntry]], Exception | None]:
    left = iter(range(times))
    return lambda _: None if next(left, None) is None else OSError("disk full")


def test_entries_are_written_in_the_order_they_came(make: Callable[..., Recorder], ledger: FakeLedger) -> None:
    recorder = make(max_batch=7)
    for entry in entries(100):
        recorder.record(entry)
    assert recorder.flush(PATIENCE_S)
    assert ledger.kept == entries(100)
    assert max(len(batch) for batch in ledger.batches) <= 7
    assert (recorder.written, recorder.dropped, recorder.buffered) == (100, 0, 0)


def test_entries_are_written_without_a_flush(make: Callable[..., Recorder], ledger: FakeLedger) -> None:
    recorder = make(flush_interval_s=0.001)
    recorder.record(an_entry(1))
    assert ledger.appended.wait(PATIENCE_S)
    ledger.appended.clear()
    recorder.record(an_entry(2))
    assert ledger.appended.wait(PATIENCE_S)


def test_a_flush_does_not_wait_for_the_interval(make: Callable[..., Recorder], ledger: FakeLedger) -> None:
    recorder = make(flush_interval_s=NEVER_S)
    recorder.record(an_entry())
    assert recorder.flush(PATIENCE_S)
    assert ledger.kept == [an_entry()]


def test_a_full_batch_does_not_wait_for_the_interval(make: Callable[..., Recorder], ledger: FakeLedger) -> None:
    recorder = make(flush_interval_s=NEVER_S, max_batch=10)
    for entry in entries(10):
        recorder.record(entry)
    assert ledger.appended.wait(PATIENCE_S)
    assert ledger.kept == entries(10)


def test_recording_goes_on_while_the_ledger_is_stuck(make: Callable[..., Recorder], ledger: FakeLedger) -> None:
    recorder = make(flush_interval_s=0.0)
    ledger.gate.clear()
    recorder.record(an_entry(0))
    assert ledger.entered.wait(PATIENCE_S)
    for entry in entries(500, first=1):
        recorder.record(entry)
    assert not recorder.flush(0.0)
    assert (recorder.written, recorder.buffered) == (0, 501)
    ledger.gate.set()
    assert recorder.flush(PATIENCE_S)
    assert ledger.kept == entries(501)


def test_what_is_recorded_during_a_write_waits_for_the_next_one(
    make: Callable[..., Recorder], ledger: FakeLedger
) -> None:
    recorder = make(flush_interval_s=NEVER_S)

    def record_another(written: Sequence[LedgerEntry]) -> None:
        if len(ledger.batches) < 50:
            recorder.record(an_entry(job_id=f"after {written[0].job_id}"))

    ledger.fail = record_another
    recorder.record(an_entry())
    for number in range(1, 4):
        assert recorder.flush(PATIENCE_S)
        assert (recorder.written, recorder.accepted) == (number, number + 1)
    ledger.fail = lambda _: None


def test_a_flush_with_nothing_to_write_returns_at_once(make: Callable[..., Recorder]) -> None:
    assert make().flush(0.0)


@pytest.mark.usefixtures("no_backoff")
def test_a_failing_append_is_tried_again_until_it_succeeds(
    make: Callable[..., Recorder], ledger: FakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.fail = failing_times(5)
    recorder = make()
    for entry in entries(20):
        recorder.record(entry)
    assert recorder.flush(PATIENCE_S)
    assert ledger.kept == entries(20)
    assert (recorder.written, recorder.dropped) == (20, 0)
    complaints = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(complaints) == 5
    assert "disk full" in complaints[0].getMessage()


def test_beyond_the_bound_the_newest_are_dropped_and_counted(
    make: Callable[..., Recorder], ledger: FakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make(flush_interval_s=0.0, max_buffered=10)
    ledger.gate.clear()
    recorder.record(an_entry(0))
    assert ledger.entered.wait(PATIENCE_S)  # what the writer holds counts against the bound
    for entry in entries(24, first=1):
        recorder.record(entry)
    assert recorder.dropped == 15
    ledger.gate.set()
    assert recorder.flush(PATIENCE_S)
    assert ledger.kept == entries(10)
    assert recorder.written == 10
    assert [one.getMessage().split(" (")[0] for one in caplog.records] == [
        f"ledger entries dropped so far: {count}" for count in (1, 2, 4, 8)
    ]
    recorder.record(an_entry(99))
    assert recorder.flush(PATIENCE_S)
    assert ledger.kept[-1] == an_entry(99)


def test_an_entry_that_can_never_be_kept_costs_only_itself(make: Callable[..., Recorder], ledger: FakeLedger) -> None:
    def refuse_the_odd_one(batch: Sequence[LedgerEntry]) -> Exception | None:
        return ValueError("no such text") if an_entry(3) in batch else None

    ledger.fail = refuse_the_odd_one
    recorder = make(flush_interval_s=NEVER_S)
    for entry in entries(10):
        recorder.record(entry)
    assert recorder.flush(PATIENCE_S)
    assert ledger.kept == [entry for entry in entries(10) if entry != an_entry(3)]
    assert (recorder.written, recorder.dropped) == (9, 1)


def test_closing_writes_what_is_left_and_closes_the_ledger_once(
    make: Callable[..., Recorder], ledger: FakeLedger
) -> None:
    recorder = make(flush_interval_s=NEVER_S, max_batch=100)
    for entry in entries(50):
        recorder.record(entry)
    recorder.close()
    recorder.close()
    assert ledger.kept == entries(50)
    assert ledger.closed == 1


def test_what_is_recorded_after_closing_is_counted_as_dropped(
    make: Callable[..., Recorder], ledger: FakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make()
    recorder.close()
    recorder.record(an_entry())
    assert (recorder.written, recorder.dropped) == (0, 1)
    assert "closed" in caplog.text
    assert ledger.kept == []


def test_closing_gives_up_on_a_ledger_that_never_recovers(
    make: Callable[..., Recorder], ledger: FakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.fail = lambda _: OSError("disk gone")
    recorder = make(flush_interval_s=NEVER_S, max_batch=4)
    for entry in entries(3):
        recorder.record(entry)
    recorder.close(timeout=0.0)
    assert (recorder.written, recorder.dropped, recorder.buffered) == (0, 3, 0)
    assert "3 entries lost" in caplog.text
    assert ledger.closed == 1


@pytest.mark.usefixtures("no_backoff")
def test_nothing_is_lost_between_recording_flushing_and_failures(
    make: Callable[..., Recorder], ledger: FakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    ledger.fail = lambda batch: OSError("flaky") if ledger.calls % 3 == 0 else None
    recorder = make(flush_interval_s=0.0, max_batch=64)
    all_entries = entries(20_000)
    for number, entry in enumerate(all_entries):
        recorder.record(entry)
        if number % 997 == 0:
            assert recorder.flush(PATIENCE_S)
    recorder.close()
    assert ledger.kept == all_entries
    assert recorder.written == 20_000


def test_gpu_time_is_written_to_its_own_table(make: Callable[..., Recorder], ledger: FakeLedger) -> None:
    recorder = make()
    row = GpuTimeRow(worker="w", started_at=0.0, kind="idle", ended_at=60.0, gpu_seconds=60.0)
    recorder.record(row)
    recorder.record(an_entry(1))
    recorder.close()
    assert ledger.gpu_time == [row]
    assert ledger.kept == [an_entry(1)]
    assert (recorder.written, recorder.dropped) == (2, 0)
