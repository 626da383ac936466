import asyncio

from inferry.ingress.http.lifecycle import StopSignals


async def allowed() -> bool:
    return True


def test_a_stop_during_the_drain_of_an_upgrade_ends_the_gateway() -> None:
    async def main() -> None:
        stop = StopSignals(may_upgrade=allowed)
        stop.request_upgrade()
        await stop.drain.wait()
        assert stop.is_upgrade
        stop.request()
        assert stop.force.is_set()
        assert not stop.is_upgrade

    asyncio.run(main())
