"""The sections of a configuration that have versions: complete as values, and back into a configuration."""

from typing import Any

import msgspec

from inferry.cli.config.conversion import convert_config
from inferry.cli.config.schema import Config, ConfigError, LaneConfig
from inferry.cli.config.validation import check_config
from inferry.domain.settings_versions import Sections
from inferry.settings.sections import VERSIONED


def sections_of(config: Config) -> Sections:
    """The sections with versions, with all defaults, as JSON has them."""
    sections = {name: _lanes(config) if name == "lanes" else getattr(config, name) for name in VERSIONED}
    found: Sections = msgspec.json.decode(msgspec.json.encode(sections))
    return found


def _lanes(config: Config) -> dict[str, dict[str, Any]]:
    lanes = {
        lane.name: {name: getattr(policy, name) for name in LaneConfig.__struct_fields__}
        for lane, policy in config.lane_policies().items()
    }
    for lane in lanes.values():
        lane["may_preempt"] = [lower.name for lower in lane["may_preempt"]]
    return lanes


def completed(sections: Sections) -> Sections:
    """Some sections with all defaults. Only types are checked: the rest of the configuration is not known. Raises
    ConfigError."""
    complete = sections_of(_replaced(Config(), sections))
    return {name: complete[name] for name in sections}


def with_sections(config: Config, sections: Sections) -> Config:
    """The configuration with these sections in place of its own. Raises ConfigError."""
    changed = _replaced(config, sections)
    problems = list(check_config(changed))
    if problems:
        raise ConfigError("; ".join(problems))
    return changed


def _replaced(config: Config, sections: Sections) -> Config:
    unknown = sorted(sections.keys() - VERSIONED.keys())
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} has no versions; sections with versions: {', '.join(VERSIONED)}")
    given = convert_config(sections)
    return msgspec.structs.replace(config, **{name: getattr(given, name) for name in sections})
