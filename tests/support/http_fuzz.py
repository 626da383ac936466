"""Generated connections, read by three implementations and compared. A connection is told by its seed and number."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from random import Random

from support import http_generator
from support.http_differences import difference, explained
from support.http_verdicts import Ours, by_gunicorn, by_h11

BLOCK = 2000
MAX_REPORTED = 20
REFERENCES = {"h11": by_h11, "gunicorn": by_gunicorn}


class Report:
    """What came of a number of connections: how often each class of difference, and what none explains."""

    def __init__(self) -> None:
        self.connections = 0
        self.served = 0
        self.refused: Counter[int] = Counter()
        self.differences: Counter[tuple[str, str, str]] = Counter()
        self.faults: list[str] = []

    def add(self, other: "Report") -> None:
        self.connections += other.connections
        self.served += other.served
        self.refused += other.refused
        self.differences += other.differences
        self.faults += other.faults

    def add_fault(self, seed: str, number: int, what: str, data: bytes) -> None:
        self.faults.append(f"seed {seed}, connection {number}: {what} in {data[:1500]!r}")

    def __str__(self) -> str:
        lines = [f"{self.connections} connections, {self.served} requests served, refused: {dict(self.refused)}"]
        lines += [f"{count:>9} {' / '.join(which)}" for which, count in sorted(self.differences.items())]
        return "\n".join([*lines, f"{len(self.faults)} without a reason", *self.faults[:MAX_REPORTED]])


def check(ours: Ours, seed: str, number: int, report: Report) -> None:
    rng = Random(f"{seed}-{number}")
    data = http_generator.a_connection(rng)
    pieces = http_generator.split_reads(rng, data)
    report.connections += 1
    try:
        whole = ours.read([data] if data else [])
        split_reads = ours.read(pieces)
    except Exception as error:
        report.add_fault(seed, number, repr(error), data)
        return
    if whole != split_reads:
        ends = (
            f"{whole.end} {whole.status} in one piece, {split_reads.end} {split_reads.status} in "
            f"{[len(one) for one in pieces]}"
        )
        report.add_fault(seed, number, ends, data)
    report.served += len(whole.requests)
    if whole.end == "refused":
        report.refused[whole.status] += 1
    for name, read in REFERENCES.items():
        theirs = read(data)
        found = difference(name, whole, theirs, data)
        if found is None:
            report.differences[name, "same", ""] += 1
            continue
        reason = explained(found)
        if reason is None:
            what = f"{found.kind} than {name}: {whole.end} {whole.status}, there {theirs.end} {theirs.why}"
            report.add_fault(seed, number, f"{what}, {found.rest[:300]!r}", data)
        else:
            report.differences[name, found.kind, reason.name] += 1


def block(seed: str, numbers: range) -> Report:
    report, ours = Report(), Ours()
    for number in numbers:
        check(ours, seed, number, report)
    return report


def _block(task: tuple[str, range]) -> Report:
    return block(*task)


def run(seed: str, connections: int) -> Report:
    """All of them, on all cores where they are many."""
    tasks = [(seed, range(at, min(at + BLOCK, connections))) for at in range(0, connections, BLOCK)]
    report = Report()
    for done in _blocks(tasks):
        report.add(done)
    return report


def _blocks(tasks: list[tuple[str, range]]) -> Iterator[Report]:
    if len(tasks) < 10:
        yield from map(_block, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        yield from pool.imap_unordered(_block, tasks)
