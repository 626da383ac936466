"""How versions of the settings differ, and what may differ between runs."""

from typing import Any

import pytest

from inferry.cli.config.loader import parse
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.sections import sections_of, with_sections
from inferry.settings.sections import COMPOSED, RUN_KEYS, VERSIONED, differences, whole_only


def test_differences_are_named_by_path_with_both_values() -> None:
    before, after = sections_of(Config()), sections_of(parse({"lanes": {"P1": {"coalesce_ms": 90, "share": 0.2}}}))
    assert [(one.name, one.before, one.after) for one in differences(before, after)] == [
        ("lanes.P1.coalesce_ms", 25.0, 90.0),
        ("lanes.P1.share", 0.1, 0.2),
    ]
    assert [one.name for one in whole_only(differences(before, after))] == ["lanes.P1.share"]
    assert differences(before, before) == []


def test_sections_are_complete_and_give_the_same_configuration_again() -> None:
    config = parse({"lanes": {"P2": {"groups": None, "prompt_buckets": [128]}, "P0": {"may_preempt": []}}})
    assert with_sections(Config(), sections_of(config)).lane_policies() == config.lane_policies()
    assert set(sections_of(config)) == set(VERSIONED)
    assert set(sections_of(config)["lanes"]["P1"]) >= RUN_KEYS


def test_invalid_sections_are_refused() -> None:
    invalid: list[dict[str, Any]] = [
        {"workers": []},
        {"lanes": {"P1": {"share": 3}}},
        {"lanes": {"P1": {"window": "never"}}},
    ]
    for sections in invalid:
        with pytest.raises(ConfigError):
            with_sections(Config(), sections)


def test_composed_models_are_complete_and_give_the_same_configuration_again() -> None:
    raw = {
        "routes": {"auto": {"rules": [{"when": {"tools": True}, "model": "pair"}], "default": "inferry-triage"}},
        "cascades": {"pair": {"small": "panel", "large": "inferry-triage", "accept": {"schema": True}}},
        "ensembles": {"panel": {"models": ["inferry-triage", "inferry-triage"]}},
        "pipelines": {
            "ask": {
                "inputs": {"texts": {"type": "list[text]"}},
                "stages": {
                    "each": {
                        "kind": "map",
                        "over": "{{ input.texts }}",
                        "stages": {
                            "one": {"kind": "generate", "model": "pair", "messages": [{"content": "{{ item }}"}]}
                        },
                    }
                },
            }
        },
    }
    config = parse(raw)
    again = with_sections(Config(), sections_of(config))
    for section in COMPOSED:
        assert getattr(again, section) == getattr(config, section)


def test_a_composed_model_may_be_changed_or_added_for_some_runs_and_not_removed() -> None:
    before = {"routes": {"a": {"default": "x"}, "b": {"default": "x"}}}
    after = {"routes": {"a": {"default": "y"}, "c": {"default": "x"}}}
    changed = differences(before, after)
    assert [one.name for one in changed] == ["routes.a.default", "routes.b", "routes.c"]
    assert [one.name for one in whole_only(changed)] == ["routes.b"]
