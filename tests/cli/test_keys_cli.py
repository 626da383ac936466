"""`inferry keys` and `inferry tenants`, on the database alone."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inferry.admission.caller_directory import Directory
from inferry.cli.main import app
from inferry.domain.callers import Caller
from inferry.domain.keys import hash_secret
from inferry.ledger.stores.tenants import TenantStore

CONFIG = """
tenants:
  acme: {max_lane: P1, max_concurrent: 64}
  own: {isolation: pool}
workers:
  - {name: a, kind: vllm, url: "http://127.0.0.1:9149"}
  - {name: b, kind: vllm, url: "http://127.0.0.1:9148", pool: own}
  - {name: c, kind: vllm, url: "http://127.0.0.1:9147", pool: spare}
"""

Inferry = Callable[..., Result]


@pytest.fixture
def inferry(tmp_path: Path) -> Inferry:
    config = tmp_path / "inferry.yaml"
    config.write_text(CONFIG + f'ledger: "sqlite:///{tmp_path / "ledger.db"}"\n')

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--config", str(config)])

    return run


def told(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def who(tmp_path: Path, key: str, wall: float = 0.0) -> Caller:
    store = TenantStore(f"sqlite:///{tmp_path / 'ledger.db'}")
    found = store.snapshot()
    store.close()
    return Directory(found.tenants, found.keys, is_auth_required=True).caller(None, key.encode(), None, wall)


def test_a_key_is_printed_alone_for_scripts_and_works(tmp_path: Path, inferry: Inferry) -> None:
    result = inferry("keys", "create", "--tenant", "globex", "--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    assert who(tmp_path, result.stdout.strip()).tenant.name == "globex"


def test_a_new_key_is_printed_once(inferry: Inferry) -> None:
    result = inferry("keys", "create", "--tenant", "globex")
    assert result.stdout.startswith("ifk_")
    for words in ("of the tenant globex", "shown only once", "globex is new and has no limits", "first key"):
        assert words in result.stderr
    again = inferry("keys", "create", "--tenant", "globex")
    assert "is new" not in again.stderr
    assert "first key" not in again.stderr
    assert "is new" not in inferry("keys", "create", "--tenant", "acme").stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_first_key_without_a_tenant_says_whose_it_is_and_that_calls_now_need_one(
    inferry: Inferry, form: tuple[str, ...]
) -> None:
    result = inferry("keys", "create", *form)
    assert "of the tenant default" in result.stderr
    assert "The tenant default is new and has no limits" in result.stderr
    assert "refuse calls without a key" in result.stderr
    assert "refuse calls" not in inferry("keys", "create", *form).stderr


def test_a_keys_limits_expiry_and_label_are_stored(inferry: Inferry) -> None:
    limits = ("max_lane=P2", "requests_per_minute=60", "day_money_ceiling=2.5", "models=tiny*,*big")
    made = told(inferry("keys", "create", *limits, "--label", "ci", "--expires", "90d", "--json"))
    assert made["limits"] == {
        "max_lane": "P2",
        "requests_per_minute": 60,
        "day_money_ceiling": 2.5,
        "models": ["tiny*", "*big"],
    }
    assert (made["label"], made["tenant"], made["status"]) == ("ci", "default", "valid")
    assert made["expires_at"] - made["created_at"] == pytest.approx(90 * 86_400)
    secret = made.pop("key").rpartition("_")[2]
    listed = inferry("keys", "list", "--json")
    assert told(listed) == [made]
    for shown in (listed.stdout, inferry("keys", "list").stdout):
        assert secret not in shown
        assert hash_secret(secret.encode()).hex() not in shown


def test_lists_are_for_one_tenant_or_one_status(inferry: Inferry) -> None:
    first = told(inferry("keys", "create", "--tenant", "acme", "--json"))["id"]
    second = told(inferry("keys", "create", "--tenant", "globex", "--json"))["id"]
    assert inferry("keys", "revoke", first).exit_code == 0
    assert [key["id"] for key in told(inferry("keys", "list", "--tenant", "globex", "--json"))] == [second]
    assert [key["id"] for key in told(inferry("keys", "list", "--status", "revoked", "--json"))] == [first]
    assert first in inferry("keys", "list").stdout
    assert inferry("keys", "list", "--tenant", "nobody").stdout == "No keys.\n"


def test_a_rotated_key_gives_its_rights_to_a_new_one(tmp_path: Path, inferry: Inferry) -> None:
    old = told(inferry("keys", "create", "--tenant", "globex", "max_concurrent=2", "--json"))
    new = told(inferry("keys", "rotate", old["id"], "--grace", "2h", "--json"))
    assert (new["tenant"], new["limits"]) == ("globex", {"max_concurrent": 2})
    ending = next(key for key in told(inferry("keys", "list", "--json")) if key["id"] == old["id"])
    assert ending["expires_at"] - new["created_at"] == pytest.approx(7200, abs=5)
    assert who(tmp_path, old["key"]).key is not None
    assert who(tmp_path, new["key"]).key is not None
    default = told(inferry("keys", "rotate", new["id"], "--json"))
    assert default["status"] == "valid"


def test_settings_are_changed_one_by_one_and_removed_with_null(inferry: Inferry) -> None:
    told(inferry("tenants", "set", "globex", "max_concurrent=8", "max_lane=P1", "shadow=true", "--json"))
    found = told(inferry("tenants", "set", "globex", "max_concurrent=null", "tokens_per_minute=5", "--json"))
    assert found == {
        "name": "globex",
        "source": "database",
        "valid_keys": 0,
        "max_lane": "P1",
        "tokens_per_minute": 5,
        "isolation": "salt",
        "shadow": True,
        "disabled": False,
    }
    assert told(inferry("tenants", "show", "globex", "--json")) == found
    assert "tokens_per_minute: 5" in inferry("tenants", "show", "globex").stdout
    listed = inferry("tenants", "list").stdout
    assert "tokens_per_minute=5" in listed
    assert not re.search("shadow=false|disabled=false|isolation=salt", listed), "defaults are left out"


def test_a_removed_tenants_keys_go_with_it(inferry: Inferry) -> None:
    inferry("keys", "create", "--tenant", "globex")
    assert inferry("tenants", "remove", "globex").stdout == "Removed globex and revoked 1 key.\n"
    assert [key["status"] for key in told(inferry("keys", "list", "--json"))] == ["revoked"]
    assert [one["name"] for one in told(inferry("tenants", "list", "--json"))] == ["acme", "own"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("tenants", "set", "acme", "max_concurrent=1"), 1, "tenants.acme"),
        (("tenants", "remove", "acme"), 1, "tenants.acme"),
        (("tenants", "set", "globex", "maxlane=P1"), 2, "did you mean max_lane?"),
        (("tenants", "set", "globex", "max_lane=P9"), 2, "max_lane: Invalid enum value 'P9'; valid: P0, P1, P2"),
        (("tenants", "set", "globex", "max_concurrent=0"), 2, "max_concurrent must be above 0"),
        (("tenants", "set", "globex", "max_concurrent=[1"), 2, "not valid YAML"),
        (("tenants", "set", "globex", "shadow"), 2, "not of the form NAME=VALUE"),
        (("tenants", "set", "globex", "isolation=pool"), 1, "`pool: globex`"),
        (("tenants", "set", "a b", "shadow=true"), 1, "1 to 64 letters"),
        (("tenants", "show", "nobody"), 1, "no such tenant"),
        (("keys", "create", "default_lane=P0", "max_lane=P1"), 2, "default_lane (P0) is above max_lane (P1)"),
        (("keys", "create", "--tenant", "a b"), 1, "1 to 64 letters"),
        (("keys", "create", "isolation=none"), 2, "unknown setting isolation"),
        (("keys", "create", "--expires", "soon"), 2, "not a duration"),
        (("keys", "create", "--expires", "36501d"), 2, "'36501d' is longer than 36500d"),
        (("keys", "create", "--expires", "999999999999d"), 2, "is longer than 36500d"),
        (("keys", "rotate", "x", "--grace", "999999999999d"), 2, "is longer than 36500d"),
        (("keys", "revoke", "nope"), 1, "there is no key `nope`"),
        (("keys", "rotate", "nope"), 1, "there is no key `nope`"),
        (("keys", "list", "--status", "odd"), 2, "valid, expired or revoked"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(
    inferry: Inferry, arguments: tuple[str, ...], status: int, words: str
) -> None:
    inferry("keys", "create", "--tenant", "someone")
    before = told(inferry("keys", "list", "--json"))
    result = inferry(*arguments)
    assert result.exit_code == status, result.output
    assert told(inferry("keys", "list", "--json")) == before
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("expires_at", [1e17, 1e30, math.inf])
def test_a_key_with_an_expiry_that_no_calendar_has_is_listed(
    tmp_path: Path, inferry: Inferry, expires_at: float
) -> None:
    store = TenantStore(f"sqlite:///{tmp_path / 'ledger.db'}")
    made = store.create_key("acme", now=0.0, expires_at=expires_at)
    store.close()
    listed = inferry("keys", "list")
    assert listed.exit_code == 0, listed.output
    assert made.key.key_id in listed.stdout
    assert "after the year 9999" in listed.stdout


def test_a_money_ceiling_without_prices_is_reported(inferry: Inferry) -> None:
    result = inferry("tenants", "set", "globex", "day_money_ceiling=5", "--json")
    assert told(result)["day_money_ceiling"] == 5
    assert "globex.day_money_ceiling: calls of" in result.stderr
    assert "the key.run_money_ceiling" in inferry("keys", "create", "run_money_ceiling=1").stderr


def test_a_tenant_pool_needs_a_worker_in_it(inferry: Inferry) -> None:
    assert told(inferry("tenants", "set", "spare", "isolation=pool", "--json"))["isolation"] == "pool"


@pytest.mark.parametrize("arguments", [("list",), ("revoke", "x"), ("rotate", "x")])
def test_a_missing_database_is_not_created(inferry: Inferry, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    missing = tmp_path / "missing.db"
    result = inferry("keys", *arguments, "--ledger", f"sqlite:///{missing}")
    assert result.exit_code == 2
    assert "no ledger at" in result.stderr
    assert not missing.exists()


def test_an_unknown_key_is_reported_without_repeating_it(inferry: Inferry) -> None:
    key = inferry("keys", "create", "--quiet").stdout.strip()
    result = inferry("keys", "revoke", key)  # the whole key where its id was meant
    assert result.exit_code == 1
    assert key not in result.output
    assert "the id of a key is the part between its two underscores" in result.stderr
    assert inferry("keys", "revoke", key.rpartition("_")[2]).stderr == result.stderr
    assert inferry("keys", "list", "--status", "valid").stdout.count("valid") == 1
