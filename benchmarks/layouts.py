"""What an earlier commit names differently, so that the benchmarks of today can measure it.

A layout lists only what benchmarks use. `install` runs in a process whose package is that of the earlier commit.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct


class Layout(Struct, frozen=True):
    """Names of one commit by their names of today.

    `modules`: the module that has the contents of a module of today. `attributes`: attributes that have another name,
    by module of today. `keywords`: keyword arguments that have another name, by class of today; None drops an argument
    that the commit does not have. `config`: keys of the configuration, as paths of keys. `metrics`: metric names.
    """

    modules: Mapping[str, str] = {}
    attributes: Mapping[str, Mapping[str, str]] = {}
    keywords: Mapping[str, Mapping[str, str | None]] = {}
    config: Mapping[tuple[str, ...], str] = {}
    metrics: Mapping[str, str] = {}


TODAY = Layout()

AT_91C68FC = Layout(
    modules={
        "inferry.cli.checkout": "inferry.checkout",
        "inferry.domain.lanes": "inferry.domain.jobs",
        "inferry.domain.routes": "inferry.domain.jobs",
        "inferry.domain.sampling": "inferry.domain.jobs",
        "inferry.domain.workers": "inferry.domain.plans",
        "inferry.scheduling.queues.fair_share": "inferry.scheduling.fairness",
        "inferry.scheduling.queues.quantum": "inferry.scheduling.quantum",
    },
    attributes={
        "inferry.domain.jobs": {"ResumeMode": "Resume"},
        "inferry.domain.plans": {"JobLocation": "Whereabouts"},
        "inferry.domain.workers": {"Capacity": "Room"},
        "inferry.scheduling.queues.fair_share": {"jain_index": "jain"},
    },
    # Groups were an argument of the scheduler. All workers are in one group here, so that none of them matters.
    keywords={
        "inferry.domain.lanes.LanePolicy": {"itl_ms": "gap_ms", "groups": None},
        "inferry.domain.workers.WorkerView": {"capacity": "room"},
    },
    config={
        ("single_flight",): "sharing",
        ("server", "retry_slots"): "keep_turns",
        ("workers", "capacity"): "room",
    },
    metrics={
        "inferry_worker_running_sequences": "inferry_running_sequences",
        "inferry_jobs_in_flight": "inferry_in_flight_jobs",
        "inferry_ledger_entries_dropped_total": "inferry_ledger_dropped_total",
    },
)

METRICS_OF_TODAY = {earlier: today for today, earlier in AT_91C68FC.metrics.items()}


def layout_of(package: Path) -> Layout:
    """The layout of a compiled package. Experiments were part of the package until they moved to this folder."""
    return AT_91C68FC if (package / "inferry" / "bench").is_dir() else TODAY


def install(layout: Layout) -> None:
    """Let modules and attributes of today be imported from the earlier package."""
    for today, earlier in layout.modules.items():
        sys.modules[today] = ModuleType(today)
        sys.modules[today].__dict__.update(vars(import_module(earlier)))
    for today, names in layout.attributes.items():
        module = import_module(today)
        for name, earlier in names.items():
            setattr(module, name, getattr(module, earlier))
    for path, keywords in layout.keywords.items():
        today, _, name = path.rpartition(".")
        module = import_module(today)
        setattr(module, name, partial(_with_keywords, getattr(module, name), keywords))


def _with_keywords(make: Callable[..., Any], keywords: Mapping[str, str | None], **arguments: Any) -> Any:
    named = {keywords.get(name, name): value for name, value in arguments.items()}
    return make(**{name: value for name, value in named.items() if name is not None})


def config_for(layout: Layout, config: Any, path: tuple[str, ...] = ()) -> Any:
    """A configuration of today with the keys of the layout. Items of a list have the path of the list."""
    if isinstance(config, list):
        return [config_for(layout, item, path) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        layout.config.get((*path, key), key): config_for(layout, value, (*path, key)) for key, value in config.items()
    }
