"""Isolation of tenants, and secrecy of keys."""

from typing import Any

import pytest
from aiohttp import web

from inferry.domain.lanes import Lane
from inferry.domain.sampling import Sampling
from inferry.domain.values import replace
from inferry.engine.messages import Request
from inferry.workers.in_process.vllm_limits import prompt_of
from inferry.workers.openai_http.profiles import (
    PROFILES,
    SGLANG,
    TGI,
    TRTLLM,
    VLLM,
    DetectedCapabilities,
    Profile,
    restrict_profile,
)
from inferry.workers.openai_http.request_bodies import MAX_SALTS, CacheSalts, streaming_body
from inferry.workers.openai_http.settings import HttpWorkerSettings
from inferry.workers.openai_http.upstream_errors import upstream_error
from support.http_jobs import a_call, done, error_of, ran, run
from support.upstream import Upstream


def test_tenants_get_salts_of_their_own_whatever_they_write() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            for tenant in ("a", "b", "a"):
                done(await ran(up, a_call(tenant=tenant, cache_salt="b's"), salt_secret="s"))
            first, second, third = [body["cache_salt"] for body in up.bodies]
            assert first == third != second
            assert first != "b's"

    run(scenario())


def test_a_client_can_separate_caches_within_its_tenant() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            for own in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}, {"cache_salt": "one"}, {"cache_salt": None}):
                done(await ran(up, a_call(tenant="a", **own), salt_secret="s"))
            none, one, two, again, null = [body["cache_salt"] for body in up.bodies]
            assert one == again
            assert none == null
            assert len({none, one, two}) == 3

    run(scenario())


def test_a_salt_cannot_be_guessed_without_the_secret() -> None:
    known, other = CacheSalts(b"secret"), CacheSalts(b"another")
    assert known.field("a") == CacheSalts(b"secret").field("a")
    assert known.field("a") != other.field("a")
    assert b'"a"' not in known.field("a")
    assert len({CacheSalts(b"k" * size).field("a") for size in (1, 64, 65, 500)}) == 4


def test_salts_of_many_tenants_do_not_pile_up() -> None:
    cache_salts = CacheSalts(b"s")
    first = cache_salts.field("0")
    for number in range(MAX_SALTS + 5):
        cache_salts.field(str(number))
    assert len(cache_salts._cache) <= MAX_SALTS
    assert cache_salts.field("0") == first


def test_without_a_secret_every_start_has_salts_of_its_own() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            await ran(up)
            await ran(up)
            assert up.bodies[0]["cache_salt"] != up.bodies[1]["cache_salt"]

    run(scenario())


@pytest.mark.parametrize(
    "settings", [{"cache_salts": False}, {"profile": SGLANG}, {"profile": TGI}, {"profile": TRTLLM}]
)
def test_no_salt_is_sent_where_it_is_switched_off_or_not_understood(settings: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            done(await ran(up, **settings))
            assert "cache_salt" not in up.bodies[0]

    run(scenario())


def test_a_tenant_that_shares_its_cache_gets_no_salt() -> None:
    async def scenario() -> None:
        async with Upstream() as up:
            for salted in (True, False):
                done(await ran(up, replace(a_call(tenant="a"), salted=salted)))
            assert ["cache_salt" in body for body in up.bodies] == [True, False]

    run(scenario())


def test_vllm_in_process_gets_the_salt_with_the_prompt() -> None:
    cache_salts = CacheSalts(b"s")
    request = Request(1, [1, 2], Sampling(), Lane.P1, cache_salts.salt("a"))
    assert prompt_of(request) == {"prompt_token_ids": [1, 2], "cache_salt": cache_salts.salt("a")}
    assert cache_salts.salt("a").encode() in cache_salts.field("a")
    assert prompt_of(Request(1, [1, 2], Sampling(), Lane.P1)) == {"prompt_token_ids": [1, 2]}


def test_upstream_errors_never_contain_the_api_key() -> None:
    async def script(up: Upstream, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": f"you sent {request.headers['authorization']}", "param": request.headers["authorization"]}
        return web.json_response({"error": error}, status=400)

    async def scenario() -> None:
        async with Upstream(script) as up:
            error = error_of(await ran(up, api_key="sk-upstream"))
            assert error.message == "you sent Bearer ***"
            assert "sk-upstream" not in f"{error.message}{error.param}{error!r}"

    run(scenario())
    settings = HttpWorkerSettings(url="http://h", api_key="sk-1", api_keys=("sk-2",), salt_secret="sk-3")
    assert "sk-" not in f"{settings!r} {settings}"


@pytest.mark.parametrize("status", [401, 403, 418, 429, 500, 502, 503])
def test_upstream_messages_not_about_the_request_are_withheld(status: int) -> None:
    error = upstream_error("w", status, b'{"error":{"message":"key sk-upstream is wrong"}}')
    assert "sk-upstream" not in error.message


def test_upstream_error_messages_are_truncated() -> None:
    error = upstream_error("w", 400, b'{"error":"' + b"x" * 50_000 + b'"}')
    assert len(error.message) <= 1000


def test_probed_capabilities_only_narrow_a_profile() -> None:
    everything = DetectedCapabilities(
        returns_token_ids=True, accepts_priority=True, supports_abort=True, has_metrics=True
    )
    nothing = DetectedCapabilities(
        returns_token_ids=False, accepts_priority=False, supports_abort=False, has_metrics=False
    )
    for profile in PROFILES.values():
        assert restrict_profile(profile, everything) == restrict_profile(profile, DetectedCapabilities()) == profile
        bare = restrict_profile(profile, nothing)
        assert (bare.can_resume, bare.supports_priority, bare.abort_path, bare.metrics) == (False, False, None, None)
        assert (bare.features, bare.cache_salts) == (profile.features, profile.cache_salts)
    assert VLLM.can_resume


@pytest.mark.parametrize("names", [None, (False, False)])
def test_fields_that_must_not_go_upstream_are_taken_out_and_no_others(names: tuple[bool, bool] | None) -> None:
    body = b'{"model":"m","priority":3,"prompt":"my priority"}'
    sent = b"".join(streaming_body(body, names, streams=False, drop={"priority"}))
    assert sent.startswith(b'{"model":"m","prompt":"my priority"')
    untouched = b'{"model":"m","prompt":"a"}'
    assert b"".join(streaming_body(untouched, names, streams=False, drop={"priority"})).startswith(untouched[:-1])


def test_a_server_that_takes_no_stream_options_is_sent_none() -> None:
    plain = Profile(kind="plain", usage_in_stream=False)

    async def scenario() -> None:
        async with Upstream() as up:
            done(await ran(up, profile=plain))
            done(await ran(up, a_call(stream_options={"include_usage": True}), profile=plain))
            assert all(body["stream"] is True for body in up.bodies)
            assert not any("stream_options" in body for body in up.bodies)

    run(scenario())
