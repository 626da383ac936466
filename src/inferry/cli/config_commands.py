"""`inferry config`: versions of the settings of a running gateway: compare, try, apply, roll back."""

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from inferry.cli.config.loader import load
from inferry.cli.config.schema import Config, ConfigError
from inferry.cli.config.sections import completed, sections_of, with_sections
from inferry.cli.config.yaml_file import one_line_error, read_yaml
from inferry.cli.config_output import change_table, comparison_table, prediction_table, shown_value
from inferry.cli.formats import parse_duration
from inferry.cli.gateway_client import DEFAULT_URL, AdminKey, Url, ask
from inferry.cli.keys import ConfigFile, Json, Ledger
from inferry.cli.settings_try import Prediction, predict
from inferry.cli.settings_wiring import read_recorded
from inferry.cli.simulate_setup import load_model
from inferry.cli.terminal import console, fail
from inferry.domain.settings_versions import Sections
from inferry.settings.sections import COMPOSED, VERSIONED, differences
from inferry.sim.workload import SimulationSetupError

config_app = typer.Typer(
    help="Versions of the settings of a gateway: diff, try, apply, rollback, history, compare.", no_args_is_help=True
)

NewFile = Annotated[
    Path, typer.Argument(help="YAML file with the new settings, such as `lanes` or `routes`.", metavar="FILE")
]
Period = Annotated[
    float, typer.Option("--last", metavar="DURATION", parser=parse_duration, help="Traffic to replay, up to now.")
]
ModelFile = Annotated[
    Path | None,
    typer.Option("--model", metavar="FILE", help="Engine model (`inferry calibrate`); default: fitted to the traffic."),
]


@config_app.command("diff")
def diff(new: NewFile, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Show how a file differs from the active version of a running gateway."""
    given = _read(new)
    active = _active(url, admin_key)
    changed = differences(active, {**active, **given})
    if as_json:
        typer.echo(
            msgspec.json.encode([{"key": one.name, "before": one.before, "after": one.after} for one in changed])
        )
        return
    for one in changed:
        typer.echo(f"{one.name}: {shown_value(one.before)} -> {shown_value(one.after)}")
    if not changed:
        typer.echo("no difference")


@config_app.command("try")
def try_settings(
    new: NewFile,
    config_file: ConfigFile = None,
    ledger: Ledger = None,
    last: Period = "1h",  # type: ignore[assignment]  # typer runs defaults through the parser
    model: ModelFile = None,
    share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Simulate a trial with this fraction of the runs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay recent traffic in the simulator with the active settings and with new ones. Changes nothing."""
    prediction = _predict(new, config_file, ledger, last, model, share)
    if prediction is not None:
        _show_prediction(prediction, as_json)


@config_app.command("apply")
def apply(
    new: Annotated[Path | None, typer.Argument(help="YAML file with the new settings.", metavar="FILE")] = None,
    version: Annotated[int | None, typer.Option("--version", help="Apply this version instead of a file.")] = None,
    share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Try the settings with this fraction of the runs first.")
    ] = None,
    note: Annotated[str, typer.Option(help="Why, for the history.")] = "",
    no_try: Annotated[bool, typer.Option("--no-try", help="Do not simulate the settings first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Apply a version made for models not served now.")] = False,
    config_file: ConfigFile = None,
    ledger: Ledger = None,
    last: Period = "1h",  # type: ignore[assignment]  # typer runs defaults through the parser
    model: ModelFile = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Apply settings to a running gateway without a restart. A prediction of lower attainment stops the command."""
    if (new is None) == (version is None):
        fail("name either a FILE or a --version")
    body: dict[str, Any] = {"note": note, "share": share, "force": force, "version": version}
    if new is not None:
        body["sections"] = _read(new)
        prediction = None if no_try else _predict(new, config_file, ledger, last, model, share)
        if prediction is not None:
            _check_prediction(prediction, _load(config_file))
    ended = ask(url, "GET", "/admin/settings", admin_key)["candidate"]
    state = ask(url, "POST", "/admin/settings", admin_key, body=body)
    _show_state(state, ended)


@config_app.command("rollback")
def rollback(
    reason: Annotated[str, typer.Option(help="Why, for the history.")] = "",
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """End the trial, or use the version before the active one again."""
    _show_state(ask(url, "POST", "/admin/settings/rollback", admin_key, body={"reason": reason}))


@config_app.command("history")
def history(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """List the changes of the settings, the latest first."""
    found = ask(url, "GET", "/admin/settings", admin_key)
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    console().print(change_table(found))


@config_app.command("compare")
def compare(url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Compare the two versions of the latest trial, or the version applied last with the one before it."""
    found = ask(url, "GET", "/admin/settings/comparison", admin_key)
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    out = console()
    before = "" if found["kind"] == "trial" else " in the time before it"
    versions = f"version {found['candidate']} against {found['active']}{before}"
    if not found["measures"]:
        out.print(f"{versions}: too few ended runs yet; a measure needs two of each version", soft_wrap=True)
        return
    out.print(comparison_table(found))
    out.print(
        f"{versions}; all intervals hold at all times with a probability of {found['confidence']:.0%}", soft_wrap=True
    )


def _predict(
    new: Path, config_file: Path | None, ledger: str | None, last_s: float, model: Path | None, share: float | None
) -> Prediction | None:
    """None where nothing that the simulator has differs."""
    base = _load(config_file)
    until = time.time()
    try:
        active, calls = read_recorded(ledger or base.ledger, until - last_s, until)
        current = base if active is None else with_sections(base, active.sections)
        changed = with_sections(current, _read(new))
        different = differences(sections_of(current), sections_of(changed))
        composed = [one.name for one in different if one.path[0] in COMPOSED]
        if composed:
            typer.echo(f"not simulated, since it depends on prompts: {', '.join(composed)}", err=True)
            if len(composed) == len(different):
                return None
        return predict(current, changed, calls, None if model is None else load_model(model), share)
    except (ConfigError, SimulationSetupError) as error:
        fail(str(error))


def _show_prediction(prediction: Prediction, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(prediction))
        return
    out = console()
    out.print(prediction_table(prediction))
    out.print(f"{prediction.calls:,} recorded calls; engine model: {prediction.model}", soft_wrap=True)
    for lane in prediction.far_lanes():
        text = f"warning: the simulation of {lane} is far from what was measured; `inferry calibrate` measures a model"
        out.print(text, soft_wrap=True)
    if prediction.left_out:
        out.print(f"{prediction.left_out:,} runs were left out: they exceed the KV capacity of an engine")


def _check_prediction(prediction: Prediction, config: Config) -> None:
    """Print the prediction; exit where attainment would fall by more than the guardrails allow."""
    _show_prediction(prediction, as_json=False)
    for lane in prediction.falling_lanes(config.settings.max_attainment_drop):
        fail(f"attainment of {lane} would fall; nothing was applied (--no-try applies it all the same)", status=1)


def _show_state(state: dict[str, Any], ended: int | None = None) -> None:
    """Print the versions in use. `ended` is the version whose trial a change has ended."""
    candidate = state["candidate"]
    tried = "" if candidate is None else f"; version {candidate['number']} for {state['share']:.0%} of the runs"
    replaced = "" if ended is None else f"; the trial of version {ended} has ended"
    typer.echo(f"version {state['active']['number']} is active{tried}{replaced}")


def _active(url: str, admin_key: str | None) -> Sections:
    found = ask(url, "GET", "/admin/settings", admin_key)
    sections: Sections = next(one["sections"] for one in found["versions"] if one["number"] == found["active"])
    return sections


def _read(path: Path) -> Sections:
    """The sections with versions in a YAML file, complete. Other sections are named and left out."""
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")
    except yaml.YAMLError as error:
        fail(f"{path} is not valid YAML: {one_line_error(error)}")
    if not isinstance(raw, dict):
        fail(f"{path} has no sections; sections with versions: {', '.join(VERSIONED)}")
    others = [str(name) for name in raw if name not in VERSIONED]
    if others:
        typer.echo(f"not applied, since only a restart changes them: {', '.join(others)}", err=True)
    given = {name: raw[name] for name in raw if name in VERSIONED}
    if not given:
        fail(f"{path} has none of the sections with versions: {', '.join(VERSIONED)}")
    try:
        return completed(given)
    except ConfigError as error:
        fail(f"{path}: {error}")


def _load(path: Path | None) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        fail(str(error))
