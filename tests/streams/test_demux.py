"""Streams of many jobs: each job has one stream, and streams do not affect each other."""

import asyncio

import pytest

from inferry.domain.attempts import Attempt
from inferry.domain.streams import Done, FinishReason, Usage
from inferry.streams.demux import Demux
from streams.builders import DONE, a_delta
from support.builders import a_job

# -- many streams ----------------------------------------------------------------------------------------------------


def test_each_job_has_a_stream_of_its_own() -> None:
    async def main() -> None:
        demux = Demux()
        a, b = (demux.open(Attempt(a_job(name, run_id="run", step_id="step"))) for name in "ab")
        assert len(demux) == 2
        assert demux.get("a") is a
        assert demux.get("b") is b
        a.push(a_delta(0, "for a", job_id="a"))
        b.push(a_delta(0, "for b", job_id="b"))
        first, second = await a.take(), await b.take()
        assert [taken[0].text for taken in (first, second) if taken[0]] == ["for a", "for b"]

    asyncio.run(main())


def test_a_job_cannot_have_two_streams() -> None:
    demux = Demux()
    stream = demux.open(Attempt(a_job("j")))
    with pytest.raises(ValueError, match="has a stream already"):
        demux.open(Attempt(a_job("j")))
    assert demux.get("j") is stream


def test_items_for_an_ended_job_are_dropped() -> None:
    async def main() -> None:
        demux = Demux()
        stream = demux.open(Attempt(a_job("j")))
        demux.close(stream, DONE)
        assert demux.get("j") is None
        assert (len(demux), demux.job_ids()) == (0, [])
        assert await stream.take() == (None, DONE), "its reader still gets the end"

    asyncio.run(main())


def test_closing_one_stream_leaves_the_others_alone() -> None:
    demux = Demux()
    first, second = demux.open(Attempt(a_job("a"))), demux.open(Attempt(a_job("b")))
    demux.close(first, Done("a", FinishReason.STOP, Usage()))
    assert demux.job_ids() == ["b"]
    assert demux.get("b") is second


def test_merges_are_counted_over_all_streams() -> None:
    async def main() -> None:
        demux = Demux()
        streams = [demux.open(Attempt(a_job(name, run_id="run", step_id="step"))) for name in "ab"]
        for stream in streams:
            for index in range(3):
                stream.push(a_delta(index, job_id=stream.attempt.job.job_id))
            await stream.take()
        assert demux.merge_counter.deltas == 4

    asyncio.run(main())
