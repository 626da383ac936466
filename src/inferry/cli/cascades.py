"""`inferry cascade tune`: the threshold that promises an agreement, from compared calls."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from inferry.cli.config.loader import load
from inferry.cli.config.schema import ConfigError
from inferry.cli.formats import parse_duration
from inferry.cli.terminal import fail
from inferry.domain.ledger import LedgerUnusable
from inferry.domain.proportions import choose_threshold
from inferry.ledger.stores.opening import open_queries

cascade_app = typer.Typer(help="Cascades: a small model answers, a large one where the small one is unsure.")


@cascade_app.callback()
def _commands() -> None:
    """A group, although it has one command."""


@cascade_app.command()
def tune(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A cascade of the configuration.")],
    agreement: Annotated[float, typer.Option(min=0.5, max=0.999, help="Agreement to promise.")] = 0.95,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Confidence of the promise.")] = 0.95,
    since: Annotated[
        float, typer.Option(metavar="DURATION", parser=parse_duration, help="Calls of this long ago: 2h, 7d.")
    ] = "30d",  # type: ignore[assignment]  # typer runs defaults through the parser
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration that names the ledger.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(metavar="URL", help="Ledger URL instead of the configuration's.")
    ] = None,
) -> None:
    """Print the lowest `min_mean_logprob` whose accepted answers agree with the large model's as often as promised."""
    try:
        config = load(config_file)
        with open_queries(ledger or config.ledger) as queries:
            pairs = queries.score_pairs(name, time.time() - since)
    except (ConfigError, LedgerUnusable) as error:
        fail(str(error))
    if not pairs and (config_file is not None or ledger is None):
        _check_known(name, config.cascades)
    found = choose_threshold(pairs, agreement, confidence)
    if found is None:
        fail(
            f"{len(pairs)} compared calls cannot promise {agreement:.1%}: wait for more of them, raise "
            f"cascades.{name}.shadow, or promise less",
            status=1,
        )
    typer.echo(f"min_mean_logprob: {found.score:.6g}")
    typer.echo(
        f"# {found.agreed} of {found.accepted} accepted answers agreed: at least {found.lower_bound:.1%} with "
        f"{confidence:.0%} confidence; {found.accepted / found.total:.0%} of {found.total} compared calls are accepted"
    )


def _check_known(name: str, cascades: Collection[str]) -> None:
    """Exit where the configuration has no such cascade."""
    if name in cascades:
        return
    if not cascades:
        fail(f"there is no cascade {name}: the configuration has none; --config names its file")
    fail(f"there is no cascade {name}; there are {', '.join(cascades)}")
