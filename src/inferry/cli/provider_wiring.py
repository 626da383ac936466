"""Makes the batch APIs of hosted workers. Part of the composition root."""

from collections.abc import Callable, Sequence

from inferry.cli.config.schema import Config
from inferry.cli.config.workers import OpenAIWorkerConfig, WorkerConfig
from inferry.cli.worker_wiring import worker_secret
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.tenants import TenantWatcher
from inferry.domain.clock import Clock
from inferry.domain.provider_batches import BatchProvider
from inferry.durable.executor import StoreExecutor
from inferry.durable.provider_run import Providers
from inferry.ledger.recorder import Recorder
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.provider_batches import ProviderBatchStore
from inferry.workers.provider_batches.anthropic_batches import VERSION, AnthropicBatches
from inferry.workers.provider_batches.openai_batches import OpenAIBatches
from inferry.workers.provider_batches.provider_client import ProviderClient

MakeProviders = Callable[[LedgerDatabase, StoreExecutor], Providers]


def providers_of(
    config: Config, clock: Clock, tenants: TenantWatcher, gateway: Gateway, recorder: Recorder
) -> MakeProviders:
    """Makes the providers of the configuration for a database."""
    prices = config.price_list()

    def cost_of(model: str, prompt: int, cached: int, output: int) -> int | None:
        price = prices.get(model, prices.get("*"))
        return None if price is None else price.nanos(prompt, cached, output)

    def make(database: LedgerDatabase, executor: StoreExecutor) -> Providers:
        return Providers(
            batch_providers(config.workers),
            ProviderBatchStore(database),
            executor,
            clock,
            caller_of=tenants.stored_caller,
            cost_of=cost_of,
            charge=recorder.record,
            is_run_cancelled=gateway.is_run_cancelled,
        )

    return make


def batch_providers(workers: Sequence[WorkerConfig]) -> list[BatchProvider]:
    hosted = [worker for worker in workers if isinstance(worker, OpenAIWorkerConfig)]
    return [_provider(worker) for worker in hosted if worker.batch_api is not None]


def _provider(config: OpenAIWorkerConfig) -> BatchProvider:
    # Files and batches belong to the account, so one of several keys is enough.
    field, secret = ("api_keys", config.api_keys[0]) if config.api_keys else ("api_key", config.api_key)
    key = worker_secret(config, field, secret) or ""
    is_anthropic = config.batch_api == "anthropic"
    headers = {"x-api-key": key, "anthropic-version": VERSION} if is_anthropic else {"authorization": f"Bearer {key}"}
    url = config.url.rstrip("/").removesuffix("/v1")
    client = ProviderClient(config.name, url, headers, config.connect_timeout_s)
    make: type[AnthropicBatches] | type[OpenAIBatches] = AnthropicBatches if is_anthropic else OpenAIBatches
    return make(
        client, worker=config.name, models=config.models, pool=config.pool, price_factor=config.batch_price_factor
    )
