"""Tenants, keys, prices and worker pools in the configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from inferry.cli.config.loader import dump, parse
from inferry.cli.config.schema import ConfigError
from inferry.cli.config.tenants import AuthConfig, advise_on_tenants, exposure_error
from inferry.cli.config.workers import HTTP_KINDS, UnsaltedWorkerConfig
from inferry.cli.main import app
from inferry.cli.worker_wiring import advise, http_worker
from inferry.domain.clock import SystemClock
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.prices import Price
from inferry.domain.routes import RouteKey
from inferry.domain.tenant_settings import LimitSettings, TenantSettings, limits_as_dict, tenant_as_dict
from inferry.domain.tenants import Limits, Tenant
from inferry.domain.workers import Phase, WorkerView
from inferry.scheduling.rules import FILTERS
from inferry.workers.openai_http.profiles import PROFILES

ACME = {
    "max_lane": "P0",
    "default_lane": "P1",
    "tokens_per_minute": 200_000,
    "max_concurrent": 64,
    "run_token_ceiling": 50_000,
    "isolation": "salt",
}
WORKER = {"kind": "vllm", "name": "a", "url": "http://10.0.0.5:8000", "models": ["m"]}


def error_of(raw: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    return str(caught.value)


def test_a_tenant_is_read_with_its_limits() -> None:
    config = parse({"tenants": {"acme": ACME, "b": {"isolation": "none", "shadow": True, "models": ["tiny*"]}}})
    assert config.configured_tenants() == {
        "acme": Tenant(
            name="acme",
            limits=Limits(default_lane=Lane.P1, tokens_per_minute=200_000, max_concurrent=64, run_token_ceiling=50_000),
        ),
        "b": Tenant(name="b", limits=Limits(models=("tiny*",)), isolation="none", shadow=True),
    }


def test_every_limit_there_is_can_be_written_and_is_shown_as_it_was_written() -> None:
    assert LimitSettings.__struct_fields__ == Limits.__struct_fields__
    assert set(TenantSettings.__struct_fields__) == {
        *Limits.__struct_fields__,
        *(name for name in Tenant.__struct_fields__ if name not in ("name", "limits")),
    }
    written = LimitSettings(models=("a",), max_lane="P1", default_lane="P2", day_money_ceiling=0.5, max_concurrent=1)
    shown = limits_as_dict(written.limits())
    assert shown == {
        "models": ("a",),
        "max_lane": "P1",
        "default_lane": "P2",
        "max_concurrent": 1,
        "day_money_ceiling": 0.5,
    }
    assert tenant_as_dict(Tenant(name="x")) == {"isolation": "salt", "shadow": False, "disabled": False}


def test_prices_are_read_by_model_and_for_all_others() -> None:
    config = parse({"prices": {"big": {"input": 2, "cached_input": 0.5, "output": 8}, "*": {"gpu_hour": 3.5}}})
    assert config.price_list() == {"big": Price(input=2.0, cached_input=0.5, output=8.0), "*": Price(gpu_hour=3.5)}


def test_what_was_read_is_dumped_and_reads_back_the_same() -> None:
    raw = {
        "auth": {"mode": "off", "allow_remote": True},
        "tenants": {"acme": ACME, "own": {"isolation": "pool"}},
        "prices": {"*": {"input": 1.0}},
        "workers": [WORKER, {**WORKER, "name": "b", "pool": "own"}],
    }
    config = parse(raw)
    shown = yaml.safe_load(dump(config))
    assert shown["tenants"]["acme"].items() >= ACME.items()
    assert shown["prices"]["*"]["input"] == 1.0
    assert shown["workers"][1]["pool"] == "own"
    again = parse(shown)
    assert [again.auth, again.tenants, again.prices, again.workers] == [
        config.auth,
        config.tenants,
        config.prices,
        config.workers,
    ]


@pytest.mark.parametrize(("written", "mode"), [("off", "off"), ("on", "on"), ("auto", "auto"), ("false", "off")])
def test_the_yaml_booleans_on_and_off_are_auth_modes(written: str, mode: str) -> None:
    assert parse(yaml.safe_load(f"auth: {{mode: {written}}}")).auth.mode == mode
    assert parse({}, {"INFERRY_AUTH__MODE": written}).auth.mode == mode


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"tenants": {"acme": {"max_lanes": "P0"}}}, "unknown key `tenants.acme.max_lanes`; did you mean `max_lane`?"),
        (
            {"tenants": {"b": {}, "acme": {"max_lane": "P7"}}},
            "tenants.acme.max_lane: Invalid enum value 'P7'; valid: P0, P1, P2",
        ),
        ({"tenants": {"acme": {"max_concurrent": 0}}}, "tenants.acme.max_concurrent must be above 0"),
        ({"tenants": {"acme": {"day_money_ceiling": -1.0}}}, "tenants.acme.day_money_ceiling must be above 0"),
        (
            {"tenants": {"acme": {"max_lane": "P1", "default_lane": "P0"}}},
            "tenants.acme.default_lane (P0) is above tenants.acme.max_lane (P1)",
        ),
        (
            {"tenants": {"a b": {}}},
            "tenants.a b: a name is 1 to 64 letters, digits, dots, dashes and underscores",
        ),
        (
            {"tenants": {"own": {"isolation": "pool"}}},
            "tenants.own.isolation is pool, but no worker has `pool: own`",
        ),
        ({"tenants": {"acme": {"weight": 0}}}, "tenants.acme.weight must be between 0.01 and 100"),
        ({"tenants": {"acme": {"weight": 101}}}, "tenants.acme.weight must be between 0.01 and 100"),
        ({"prices": {"m": {"ouput": 1}}}, "unknown key `prices.m.ouput`; did you mean `output`?"),
        ({"prices": {"m": {"output": -1.0}}}, "prices.m.output must be at least 0"),
        ({"workers": [{**WORKER, "pool": "a b"}]}, "workers[0].pool must be a tenant's name"),
        ({"workers": [{**WORKER, "gpus": -1}]}, "workers[0].gpus must be at least 0"),
        (
            {"auth": {"allow_remote": True}},
            "auth.allow_remote requires auth.mode: off; it is auto",
        ),
    ],
)
def test_an_invalid_tenant_setting_is_reported_with_its_path(raw: Any, message: str) -> None:
    assert error_of(raw) == message


def test_a_ceiling_in_money_wants_a_price_per_token_for_every_model() -> None:
    def advice(prices: Any) -> list[str]:
        config = parse({"tenants": {"acme": {"day_money_ceiling": 5}}, "prices": prices, "workers": [WORKER]})
        return [*advise_on_tenants(config.tenants, config.prices, config.workers)]

    (sentence,) = advice({"m": {"gpu_hour": 2.0}, "other": {"input": 1.0}})
    assert "tenants.acme.day_money_ceiling" in sentence
    assert "calls of m" in sentence
    assert advice({"*": {"output": 1.0}}) == []
    assert advice({"m": {"input": 0.1}}) == []
    assert len(advice({"m": {"gpu_hour": 1.0}, "*": {"input": 1.0}})) == 1, "the model's own price counts"


def test_a_ceiling_in_money_of_a_price_per_gpu_hour_is_not_exact() -> None:
    config = parse(
        {"tenants": {"a": {"day_money_ceiling": 5}}, "prices": {"m": {"gpu_hour": 2.0}}, "workers": [WORKER]}
    )
    (sentence,) = advise_on_tenants(config.tenants, config.prices, config.workers)
    assert "calls of m may exceed it by the GPU time until they are stopped" in sentence


def test_a_price_per_gpu_hour_of_a_worker_without_gpus_is_reported() -> None:
    hosted = {"kind": "openai", "name": "h", "url": "https://api.example.com", "models": ["m"]}
    for worker, count in ((hosted, 1), ({**hosted, "gpus": 1}, 0)):
        config = parse({"prices": {"*": {"gpu_hour": 2.0}}, "workers": [worker]})
        found = [*advise_on_tenants(config.tenants, config.prices, config.workers)]
        assert len(found) == count
        assert all("worker h has no GPUs" in sentence for sentence in found)


def test_a_pool_worker_whose_tenant_does_not_use_it_is_reported() -> None:
    config = parse({"tenants": {"acme": {}}, "workers": [WORKER, {**WORKER, "name": "b", "pool": "acme"}]})
    (sentence,) = advise_on_tenants(config.tenants, config.prices, config.workers)
    assert "worker b is reserved for tenant acme, whose isolation is salt" in sentence


def test_a_pool_worker_serves_only_its_tenant() -> None:
    config = parse(
        {"tenants": {"own": {"isolation": "pool"}}, "workers": [WORKER, {**WORKER, "name": "b", "pool": "own"}]}
    )
    everybodys, owns = (http_worker(one, SystemClock(), DEFAULT_LANES).view() for one in config.workers)  # type: ignore[arg-type]
    assert everybodys.phase is Phase.STARTING
    for view, isolation, is_served in ((everybodys, None, True), (everybodys, "own", False), (owns, "own", True)):
        assert _serves(view, _route(view.models, isolation)) is is_served
    assert not _serves(owns, _route(owns.models, None))


def _serves(view: WorkerView, route: RouteKey) -> bool:
    return all(allows(view, route) for allows in FILTERS)


def _route(models: Any, isolation: str | None) -> RouteKey:
    (model,) = models
    return RouteKey(model, isolation=isolation)


# -- where a gateway may listen --------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    assert exposure_error(AuthConfig(), host, is_auth_required=False) is None
    assert exposure_error(AuthConfig(mode="off"), host, is_auth_required=False) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway.example", ""])
def test_a_public_address_needs_keys_or_an_explicit_setting(host: str) -> None:
    refused = exposure_error(AuthConfig(), host, is_auth_required=False)
    assert refused is not None
    assert "inferry keys create" in refused
    refused = exposure_error(AuthConfig(mode="off"), host, is_auth_required=False)
    assert refused is not None
    assert "auth.allow_remote" in refused
    assert exposure_error(AuthConfig(), host, is_auth_required=True) is None
    assert exposure_error(AuthConfig(mode="off", allow_remote=True), host, is_auth_required=False) is None


@pytest.fixture
def check(tmp_path: Path) -> Callable[[str], Any]:
    def run(text: str) -> Any:
        path = tmp_path / "inferry.yaml"
        path.write_text(text)
        return CliRunner().invoke(app, ["check-config", "--config", str(path)])

    return run


def test_check_config_reports_unpriced_models(check: Callable[[str], Any]) -> None:
    result = check("tenants: {acme: {day_money_ceiling: 5}}\n")
    assert result.exit_code == 0
    assert "# tenants.acme.day_money_ceiling: calls of inferry-triage are not counted" in result.stdout
    assert "# tenants" not in check("tenants: {acme: {day_money_ceiling: 5}}\nprices: {'*': {input: 1}}\n").stdout


def test_check_config_finds_pools_in_the_workers_file_too(tmp_path: Path, check: Callable[[str], Any]) -> None:
    workers = tmp_path / "workers.yaml"
    workers.write_text("- {name: a, kind: vllm, url: 'http://10.0.0.5:8000'}\n")
    text = f"tenants: {{own: {{isolation: pool}}}}\nworkers_file: {workers}\n"
    result = check(text)
    assert result.exit_code == 2
    assert "no worker has `pool: own`" in " ".join(result.stderr.split())
    workers.write_text("- {name: a, kind: vllm, url: 'http://10.0.0.5:8000', pool: own}\n")
    assert check(text).exit_code == 0


UNSALTED = [kind for kind in HTTP_KINDS if issubclass(kind, UnsaltedWorkerConfig)]


def test_every_kind_has_a_salted_cache_or_none_that_tenants_share_unasked() -> None:
    kinds = {str(kind.__struct_config__.tag) for kind in UNSALTED}
    assert kinds == {profile.kind for profile in PROFILES.values() if not profile.cache_salts and not profile.is_hosted}


@pytest.mark.parametrize("kind", UNSALTED, ids=lambda kind: str(kind.__struct_config__.tag))
def test_tenants_share_a_cache_without_salts_only_where_the_configuration_says_so(
    kind: type[UnsaltedWorkerConfig],
) -> None:
    raw = {**WORKER, "kind": kind.__struct_config__.tag}
    assert "cannot salt its prefix cache, so tenants would share it" in error_of({"workers": [raw]})
    assert "workers[0].isolation" in error_of({"workers": [{**raw, "isolation": "salt"}]})
    own, shared = {**raw, "pool": "acme"}, {**raw, "isolation": "none"}
    assert not any("share" in line for line in advise(parse({"workers": [own]})))
    assert any("tenants share its prefix cache" in line for line in advise(parse({"workers": [shared]})))


def test_a_salted_cache_is_shared_on_request_and_that_is_said() -> None:
    assert not any("share" in line for line in advise(parse({"workers": [WORKER]})))
    shared = {**WORKER, "isolation": "none"}
    assert any("tenants share its prefix cache" in line for line in advise(parse({"workers": [shared]})))
