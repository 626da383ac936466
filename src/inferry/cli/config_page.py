"""The reference page of the configuration, from its structs."""

import inspect
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from inferry.cli.checkout import ROOT
from inferry.cli.config import (
    alerts,
    callbacks,
    cluster,
    histories,
    overflow,
    pipelines,
    retention,
    scaling,
    schema,
    sessions,
    single_flight,
    tenants,
    tracing,
    trials,
    workers,
)
from inferry.cli.config.alerts import AlertRuleConfig, AlertsConfig, AlertWebhookConfig
from inferry.cli.config.callbacks import CallbacksConfig
from inferry.cli.config.environment import ADMIN_KEY, ENV_PREFIX
from inferry.cli.config.histories import HistoryConfig
from inferry.cli.config.loader import dump, parse
from inferry.cli.config.overflow import OverflowConfig
from inferry.cli.config.scaling import ScalingConfig
from inferry.cli.config.schema import Config, HealthConfig, LaneConfig, ServerConfig
from inferry.cli.config.sessions import SessionsConfig
from inferry.cli.config.single_flight import SingleFlightConfig
from inferry.cli.config.storage import StorageConfig
from inferry.cli.config.tenants import AuthConfig, PriceConfig, TenantConfig
from inferry.cli.config.tracing import TracingConfig
from inferry.cli.config.trials import SettingsConfig
from inferry.cli.config.workers import (
    HTTP_KINDS,
    EmbeddedWorkerConfig,
    HttpWorkerConfig,
    PythonWorkerConfig,
    RayWorkerConfig,
    UnsaltedWorkerConfig,
    VllmInProcessWorkerConfig,
)
from inferry.cli.markdown import attribute_docs, page, table
from inferry.domain import storage, tenant_settings
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.observe.alerts import ALERT_RULES
from inferry.pipelines import declaration, rules
from inferry.pipelines import settings as composed

REFERENCE = ROOT / "docs" / "reference"

_TYPES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    types.NoneType: "null",
    Any: "any value",
}
_EXAMPLE_WORKERS = [
    {"kind": "embedded"},
    {"kind": "vllm", "name": "gpu-a", "url": "http://10.0.0.5:8000"},
    {"kind": "vllm-inprocess", "name": "gpu-c", "model": "./models/llama"},
]


def _config_docs() -> dict[tuple[str, str], str]:
    """The docstrings of all configuration keys, by struct and key."""
    docs = attribute_docs(schema) | attribute_docs(workers) | attribute_docs(tenants)
    modules = (composed, rules, alerts, histories, single_flight, callbacks, cluster, retention, scaling)
    for module in (*modules, overflow, pipelines, declaration, sessions, tracing, trials):
        docs |= attribute_docs(module)
    docs |= {("PipelineConfig", name): text for (struct, name), text in docs.items() if struct == "Pipeline"}
    unsalted = [kind for kind in HTTP_KINDS if issubclass(kind, UnsaltedWorkerConfig)]
    docs |= {(kind.__name__, "isolation"): docs["UnsaltedWorkerConfig", "isolation"] for kind in unsalted}
    for (struct, name), text in attribute_docs(tenant_settings).items():
        docs["TenantConfig" if struct in ("LimitSettings", "TenantSettings") else struct, name] = text
    docs |= {("StorageConfig", name): text for (_, name), text in attribute_docs(storage).items()}
    return docs


def config_page() -> str:
    docs = _config_docs()
    return page(
        "Configuration",
        "src/inferry/cli/config/ and src/inferry/domain/tenant_settings.py",
        "One YAML file, given with `--config`. Every key except the name and URL of an HTTP worker has a default, so "
        "an empty file is a valid configuration. Unknown keys and invalid values are errors that name their path. "
        "`inferry check-config --config FILE` prints the configuration with defaults and without secrets.",
        f"An environment variable sets one key: `{ENV_PREFIX}SERVER__PORT=9000` is `server.port`, "
        f"`{ENV_PREFIX}LANES__P2__SHARE=0.1` is `lanes.P2.share`, `{ENV_PREFIX}LEDGER` is `ledger`, "
        f"`{ENV_PREFIX}WORKERS_FILE` is `workers_file`, `{ADMIN_KEY}` is `server.admin_key`. "
        "Values are read as YAML and override the file. Entries of `workers` cannot be set this way.",
        *_section("Top level", "", Config, docs),
        *_section("`server`", "server.", ServerConfig, docs),
        *_section("`health`", "health.", HealthConfig, docs),
        *_section("`scaling`", "scaling.", ScalingConfig, docs),
        *_section("`overflow`", "overflow.", OverflowConfig, docs),
        *_section("`settings`", "settings.", SettingsConfig, docs),
        *_composed_sections(docs),
        *_section("`sessions`", "sessions.", SessionsConfig, docs),
        *_section("`single_flight`", "single_flight.", SingleFlightConfig, docs),
        *_section("`storage`", "storage.", StorageConfig, docs),
        *_section("`histories`", "histories.<model>.", HistoryConfig, docs),
        *_section("`callbacks`", "callbacks.", CallbacksConfig, docs),
        *_section("`tracing`", "tracing.", TracingConfig, docs),
        *_section("`retention`", "retention.", retention.RetentionConfig, docs),
        *_section("`cluster`", "cluster.", cluster.ClusterConfig, docs),
        *_section("`alerts`", "alerts.", AlertsConfig, docs),
        *_section("`alerts.rules`", "alerts.rules.<rule>.", AlertRuleConfig, docs),
        _alert_rules(),
        *_section("`alerts.webhook`", "alerts.webhook.", AlertWebhookConfig, docs),
        *_section("`auth`", "auth.", AuthConfig, docs),
        *_section("`tenants`", "tenants.<name>.", TenantConfig, docs),
        *_section("`prices`", "prices.<model>.", PriceConfig, docs),
        *_pipeline_sections(docs),
        *_lanes_section(docs),
        *_section("`workers[]` of `kind: embedded`", "", EmbeddedWorkerConfig, docs),
        *_section("`workers[]` of every kind over HTTP", "", HttpWorkerConfig, docs),
        *(
            part
            for kind in HTTP_KINDS
            for part in _section(
                f"`workers[]` of `kind: {kind.__struct_config__.tag}`", "", kind, docs, HttpWorkerConfig
            )
        ),
        *_other_worker_sections(docs),
        "## Complete example",
        "Every key with its default, and three kinds of workers. A configuration needs only the keys it changes.",
        f"```yaml\n{example_config()}```",
    )


def _composed_sections(docs: dict[tuple[str, str], str]) -> Iterator[str]:
    yield from _section("`routes`", "routes.<name>.", composed.RouteConfig, docs)
    yield from _section("`routes` rules", "routes.<name>.rules[].", rules.Rule, docs)
    yield from _section("`routes` conditions", "routes.<name>.rules[].when.", rules.Condition, docs)
    yield from _section("`routes` classifiers", "routes.<name>.classify.", composed.ClassifierConfig, docs)
    yield from _section("`cascades`", "cascades.<name>.", composed.CascadeConfig, docs)
    yield from _section("`cascades` acceptance", "cascades.<name>.accept.", composed.AcceptConfig, docs)
    yield from _section("`ensembles`", "ensembles.<name>.", composed.EnsembleConfig, docs)
    yield from _section("Verifiers of cascades and ensembles", "verifier.", composed.VerifierConfig, docs)


def _pipeline_sections(docs: dict[tuple[str, str], str]) -> Iterator[str]:
    yield from _section("`pipelines`", "pipelines.<name>.", pipelines.PipelineConfig, docs)
    yield from _section("`pipelines.<name>.inputs`", "inputs.<input>.", declaration.PipelineInput, docs)
    for kind in declaration.STAGE_KINDS:
        yield from _section(f"`stages.<stage>` of `kind: {kind.__struct_config__.tag}`", "", kind, docs)
    yield from _section("`messages[]` of a stage of `kind: generate`", "", declaration.Message, docs)


def _other_worker_sections(docs: dict[tuple[str, str], str]) -> Iterator[str]:
    for kind in (VllmInProcessWorkerConfig, PythonWorkerConfig, RayWorkerConfig):
        yield from _section(f"`workers[]` of `kind: {kind.__struct_config__.tag}`", "", kind, docs)


def example_config() -> str:
    """A configuration with every key."""
    return dump(parse({"workers": _EXAMPLE_WORKERS}))


def _section(
    title: str, prefix: str, struct: type[Struct], docs: dict[tuple[str, str], str], base: type[Struct] | None = None
) -> Iterator[str]:
    """The keys of a Struct; inherited from `base` only if it redefines them."""
    yield f"## {title}"
    yield inspect.cleandoc(struct.__doc__ or "")
    rows = [
        (
            f"`{prefix}{field.encode_name}`",
            type_name(field.type),
            default_name(field),
            docs[struct.__name__, field.name],
        )
        for field in msgspec.structs.fields(struct)
        if base is None or (struct.__name__, field.name) in docs
    ]
    if rows:
        yield table(("key", "type", "default", "meaning"), rows)


def _alert_rules() -> str:
    """The rules with their defaults."""
    rows = [
        (
            f"`{rule.name}`",
            rule.severity,
            "" if rule.threshold is None else shown(rule.threshold),
            rule.unit,
            shown(rule.for_s),
        )
        for rule in ALERT_RULES
    ]
    return table(("rule", "severity", "threshold", "unit", "`for_s`"), rows)


def _lanes_section(docs: dict[tuple[str, str], str]) -> Iterator[str]:
    lanes = [lane.name for lane in Lane]
    yield "## `lanes`"
    named = [f"`{name}` is {docs['LanesConfig', name].rstrip('.').lower()}" for name in lanes]
    yield f"The three lanes: {', '.join(named)}. Omitted keys keep the lane's default."
    rows = []
    for field in msgspec.structs.fields(LaneConfig):
        defaults = [shown(getattr(DEFAULT_LANES[lane], field.name)) for lane in Lane]
        key = f"`lanes.<lane>.{field.encode_name}`"
        rows.append((key, type_name(field.type), *defaults, docs["LaneConfig", field.name]))
    yield table(("key", "type", *(f"default {name}" for name in lanes), "meaning"), rows)


def type_name(kind: Any) -> str:
    """A type in words."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if typing.get_origin(kind) is dict:
        return "mapping"
    if typing.get_origin(kind) is tuple:
        return f"list of {type_name(arguments[0])}"
    if arguments:
        return " or ".join(dict.fromkeys(type_name(one) for one in arguments if one is not UnsetType))
    if isinstance(kind, type) and issubclass(kind, Struct):
        return "worker" if kind.__struct_config__.tag is not None else "section"
    return _TYPES[kind]


def default_name(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default is UNSET:
        return "none"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, Struct):
        return "see below"
    if isinstance(value, tuple) and value:
        return "one embedded worker"
    return shown(value)


def shown(value: Any) -> str:
    """A value as in YAML."""
    if isinstance(value, tuple) and value and all(isinstance(one, Lane) for one in value):
        return f"`[{', '.join(lane.name for lane in value)}]`"
    if isinstance(value, float):
        return f"`{value:.0f}`" if value.is_integer() else f"`{value:g}`"
    return f"`{json.dumps(value).strip(chr(34))}`"


# -- errors ----------------------------------------------------------------------------------------------------------
