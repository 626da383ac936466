"""Makes a gateway's side of pull-workers, and what shows dead letters. Part of the composition root."""

from inferry.cli.cluster_keys import read_key
from inferry.cli.config.schema import Config
from inferry.cli.storage_wiring import Storage
from inferry.dispatch.tenants import TenantWatcher
from inferry.domain.ledger import LedgerEntry
from inferry.durable.dead_letters import DeadLetters
from inferry.durable.pulled_work import PulledWork
from inferry.ingress.admin_work import AdminWork
from inferry.ingress.app import App
from inferry.ledger.recorder import Recorder


def mount_work(config: Config, app: App, storage: Storage, tenants: TenantWatcher, recorder: Recorder) -> None:
    """Serve dead letters to operators, and work to pull-workers where the configuration has them."""
    cluster, pulled, key = config.cluster, None, None
    if storage.queued is not None and cluster.pull_models:
        prices = config.price_list()

        def cost_of(entry: LedgerEntry) -> int | None:
            price = prices.get(entry.model, prices.get("*"))
            tokens = entry.prompt_tokens, entry.cached_tokens, entry.output_tokens
            return None if price is None else price.nanos(*tokens, entry.gpu_seconds)

        key = read_key(cluster.worker_key_env, "cluster.worker_key_env")
        pulled = PulledWork(
            storage.queued.work,
            cluster.pull_models,
            caller_of=tenants.stored_caller,
            cost_of=cost_of,
            record=recorder.record,
            max_bytes=config.server.max_body_bytes,
        )
    dead_letters = DeadLetters(storage.documents)
    app.mount_admin(lambda refuse, fail: AdminWork(refuse, fail, dead_letters, pulled, key))
