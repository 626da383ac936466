"""Makes a pull-worker: engines of its host, for work of the queue. Part of the composition root."""

import asyncio
from collections.abc import Sequence

from inferry.cli.app_wiring import http_limits
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.gateway_wiring import make_gateway
from inferry.cli.wiring import health_policy, watch_tenants
from inferry.cli.worker_wiring import make_worker, worker_kind
from inferry.dispatch.periodic_task import PeriodicTask
from inferry.dispatch.pool import Pool
from inferry.domain.callers import Caller
from inferry.domain.clock import SystemClock
from inferry.domain.errors import WorkerLost
from inferry.domain.lanes import Lane
from inferry.domain.ports import Tokenizer, Worker
from inferry.domain.tenants import Tenant
from inferry.durable.gateway_work import CollectedRows, GatewayWork, NoGateway
from inferry.durable.work_runner import WorkRefused, WorkRunner
from inferry.ingress.admin_work import WORK
from inferry.ingress.app import App
from inferry.ingress.auth import Auth
from inferry.ingress.stored_calls import StoredCalls
from inferry.ledger.recorder import Recorder
from inferry.observe.metrics import Metrics
from inferry.workers.http_client import Client
from inferry.workers.openai_http.server_client import ServerClient

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 5.0
POLL_S = 0.1
GPU_TIME_S = 1.0
_REFUSED = frozenset({400, 413})


class GatewayClient:
    """Posts to the first of several gateways that answers, and stays with it."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._clients = [Client(url.rstrip("/"), headers, CONNECT_TIMEOUT_S) for url in urls]
        self._servers = [ServerClient(client, MAX_RESPONSE_BYTES) for client in self._clients]

    async def post(self, body: bytes) -> bytes:
        """Raises NoGateway, and WorkRefused for a message that a gateway does not understand or finds too large."""
        problem = "no gateway"
        for _ in self._servers:
            try:
                headers = b"content-type: application/json\r\n"
                status, answer = await self._servers[0].post(WORK.encode(), headers, body, TIMEOUT_S)
                if status == 200:
                    return answer
                problem = f"the gateway answered {status}"
                if status in _REFUSED:
                    raise WorkRefused(problem)
            except WorkerLost as error:
                problem = error.message
            self._servers.append(self._servers.pop(0))
        raise NoGateway(problem)

    def close(self) -> None:
        for client in self._clients:
            client.close()


class _Tenants:
    """Tenants of a pull-worker: as the gateway names them, which has checked their limits."""

    def stored_caller(self, tenant: str, key_id: str | None) -> Caller:
        return Caller(Tenant(name=tenant))


class PullWorker:
    """Engines of this host, and what runs work of the queue on them. Made on the event loop that runs it."""

    def __init__(
        self, config: Config, redis_url: str, gateways: Sequence[str], key: str, name: str, concurrency: int
    ) -> None:
        try:
            from inferry.cluster.redis_work_queue import RedisWorkQueue
        except ModuleNotFoundError:
            raise ConfigError("pull-workers need the `redis` extra (pip install 'inferry[redis]')") from None
        clock = SystemClock()
        workers, tokenizers, kinds = _make_workers(config, clock)
        self.models = sorted({model for worker in workers for model in worker.view().models})
        rows = CollectedRows()
        self._recorder = Recorder(rows)
        self._pool = Pool(workers, clock, health=health_policy(config.health), kinds=kinds)
        metrics = Metrics(self.models, [worker.name for worker in workers])
        self.gateway = make_gateway(
            lanes=config.lane_policies(),
            pool=self._pool,
            recorder=self._recorder,
            metrics=metrics,
            clock=clock,
            tokenizers=tokenizers,
            max_queued_bytes=config.server.max_queued_bytes,
            request_timeout_s=config.server.request_timeout_s,
        )
        auth = Auth(watch_tenants(config, clock), allow_remote=False, wall=clock.wall)
        self._app = App(self.gateway, metrics, http_limits(config.server), auth)
        self._client = GatewayClient(gateways, key)
        self._queue = RedisWorkQueue(redis_url)
        self.source = GatewayWork(self._client.post, self.models, rows, lambda: self._recorder.flush(FLUSH_TIMEOUT_S))
        execute = StoredCalls(self._app.serve, self._app.inference_paths, _Tenants())
        lanes = {Lane.P2.name: concurrency}
        self.runner = WorkRunner(
            self._queue, self.source, execute, clock, consumer=name, lanes=lanes, models=self.models
        )
        self._gpu_time = PeriodicTask(self._account_gpu_time, GPU_TIME_S, "GPU time")

    async def start(self) -> None:
        """Return once the engines are up and a gateway has accepted this worker. Raises NoGateway."""
        self.gateway.start()
        while not self.gateway.is_ready:  # noqa: ASYNC110  # the gateway has no event for it
            await asyncio.sleep(POLL_S)
        await self.source.load([])
        self._gpu_time.start()
        self.runner.start()

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more work, finish what runs for `drain_s`, and put the rest back."""
        await self.runner.close(drain_s)
        await self._gpu_time.close()
        await self._app.close()
        await self.gateway.close()
        self._client.close()
        await self._queue.close()

    async def _account_gpu_time(self) -> None:
        self.gateway.account_gpu_time(self.gateway.now())


def _make_workers(config: Config, clock: SystemClock) -> tuple[list[Worker], dict[str, Tokenizer], dict[str, str]]:
    workers: list[Worker] = []
    tokenizers: dict[str, Tokenizer] = {}
    for one in config.workers:
        worker, found = make_worker(one, clock, config.lane_policies(), config.health)
        workers.append(worker)
        tokenizers.update(found)
    return workers, tokenizers, {one.name: worker_kind(one) for one in config.workers}
