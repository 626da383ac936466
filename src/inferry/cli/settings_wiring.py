"""Settings with versions, applied to a gateway. Part of the composition root."""

from collections.abc import Callable
from functools import partial

from inferry.cli.composed_wiring import ComposedModels
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.sections import sections_of, with_sections
from inferry.dispatch.gateway import Gateway
from inferry.dispatch.settings_manager import SettingsManager
from inferry.domain.clock import Clock
from inferry.domain.errors import InvalidRequest
from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.ledger_urls import IN_MEMORY
from inferry.domain.run_split import RunSplit
from inferry.domain.settings_versions import Sections, SettingsState, SettingsVersion
from inferry.domain.traffic import RecordedCall
from inferry.durable.executor import StoreExecutor
from inferry.ledger.stores.database import LedgerDatabase
from inferry.ledger.stores.opening import open_queries, require_shared
from inferry.ledger.stores.settings import SettingsStore
from inferry.scheduling.lane_switch import LaneTrial


def make_settings(
    config: Config,
    lanes: dict[Lane, LanePolicy],
    composed: ComposedModels,
    gateway: Gateway,
    database: LedgerDatabase,
    executor: StoreExecutor,
    clock: Clock,
) -> SettingsManager:
    """The settings in use, restored. `lanes` is read by every component that needs policies, and updated in place."""

    def prepare(state: SettingsState, split: RunSplit | None) -> Callable[[], None]:
        versions = [one for one in (state.active, state.candidate) if one is not None]
        configs = [with_sections(config, one.sections) for one in versions]
        sets = composed.make(configs)

        def use() -> None:
            trial = None
            if state.candidate is not None and split is not None:
                trial = LaneTrial(configs[1].lane_policies(), state.candidate.number, split)
            lanes.update(configs[0].lane_policies())
            gateway.use_lanes(lanes, state.active.number, trial)
            composed.versions.use(sets[0], sets[-1], split)

        return use

    settings = SettingsManager(
        SettingsStore(database),
        run=executor.run,
        wall=clock.wall,
        complete=partial(_complete, config),
        prepare=prepare,
        models=lambda: served_models(config, gateway),
        guardrails=config.settings.guardrails(),
        can_try=config.ledger != IN_MEMORY,
    )
    settings.restore(sections_of(config))
    return settings


def served_models(config: Config, gateway: Gateway) -> set[str]:
    """The models of the workers, and those that the configuration names for workers that are not up yet."""
    return {*gateway.models.cards(), *(model for worker in config.workers for model in worker.models)}


def _complete(config: Config, sections: Sections) -> Sections:
    """The sections with defaults. Raises InvalidRequest."""
    try:
        return sections_of(with_sections(config, sections))
    except ConfigError as error:
        raise InvalidRequest(str(error), param="sections") from None


def read_recorded(ledger: str, since: float, until: float) -> tuple[SettingsVersion | None, list[RecordedCall]]:
    """The active version and the calls of a period, as a ledger has them. Raises ConfigError."""
    try:
        require_shared(ledger)
        with open_queries(ledger) as queries:
            return queries.active_settings(), queries.calls(since, until)
    except LedgerUnusable as error:
        raise ConfigError(str(error)) from None
