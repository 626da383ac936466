"""`inferry cascade tune` on compared calls of a ledger."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from inferry.cli.main import app
from inferry.domain.ledger import ComposedRow
from inferry.ledger.stores.attempts import AttemptStore


def a_row(
    number: int, score: float | None, agreed: bool | None, *, name: str = "pair", age_s: float = 0
) -> ComposedRow:
    return ComposedRow(
        call_id=f"{name}-{number}",
        ended_at=time.time() - age_s,
        tenant="t",
        name=name,
        kind="cascade",
        path="small",
        accepted=True,
        reason="accepted",
        score=score,
        agreed=agreed,
    )


@pytest.fixture
def database(tmp_path: Path) -> str:
    """400 sure answers that agree, 400 unsure ones of which half do, and rows that do not count."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    store = AttemptStore(url)
    store.append_composed(
        [
            *(a_row(number, -0.1 - number / 10_000, True) for number in range(400)),
            *(a_row(400 + number, -1.0 - number / 10_000, number % 2 == 0) for number in range(400)),
            a_row(801, -0.01, None),
            a_row(802, None, False),
            *(a_row(number, -0.05, False, name="other") for number in range(500)),
            *(a_row(1000 + number, -0.05, False, age_s=40 * 86_400) for number in range(500)),
        ]
    )
    store.close()
    return url


def tune(database: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["cascade", "tune", "pair", "--ledger", database, *arguments])


def test_the_threshold_that_keeps_the_promise_is_printed_as_yaml(database: str) -> None:
    found = tune(database, "--agreement", "0.95")
    assert found.exit_code == 0, found.output
    first, second = found.stdout.splitlines()
    # 20 candidates of 40 pairs each. The one of 440 pairs has 420 that agree, whose bound is below 95 %.
    assert first == "min_mean_logprob: -0.1399"
    assert second == (
        "# 400 of 400 accepted answers agreed: at least 98.5% with 95% confidence; "
        "50% of 800 compared calls are accepted"
    )


def test_a_weaker_promise_has_a_lower_threshold(database: str) -> None:
    strict, weak = (float(tune(database, "--agreement", one).stdout.split()[1]) for one in ("0.95", "0.85"))
    assert weak < -1.0 < strict


def test_a_promise_that_the_calls_cannot_keep_is_refused(database: str) -> None:
    found = tune(database, "--agreement", "0.995")
    assert (found.exit_code, "800 compared calls cannot promise 99.5%" in found.output.replace("\n", " ")) == (1, True)


def test_only_calls_of_the_time_count(database: str) -> None:
    assert tune(database, "--agreement", "0.95", "--since", "60d").exit_code == 1, "older calls did not agree"


@pytest.mark.parametrize("name", ["nope", "line"])
def test_a_name_of_no_cascade_is_refused_with_the_names_there_are(database: str, tmp_path: Path, name: str) -> None:
    stage = {"kind": "generate", "model": "small", "messages": [{"content": "{{ input.text }}"}]}
    cascade = {"small": "small", "large": "large", "accept": {"min_mean_logprob": -0.5}}
    config: dict[str, object] = {
        "ledger": database,
        "workers": [{"name": "up", "kind": "vllm", "url": "http://localhost:1", "models": ["small", "large"]}],
        "cascades": {"pair": cascade, "new": cascade},
        "pipelines": {"line": {"inputs": {"text": {}}, "stages": {"answer": stage}}},
    }

    def tuned(name: str) -> tuple[int, str]:
        file = tmp_path / "a.yaml"
        file.write_text(json.dumps(config))
        found = CliRunner().invoke(app, ["cascade", "tune", name, "--config", str(file)])
        return found.exit_code, " ".join(found.output.split())

    status, output = tuned(name)
    assert (status, f"there is no cascade {name}; there are pair, new" in output) == (2, True), output
    assert tuned("pair")[0] == 0
    status, output = tuned("new")
    assert (status, "0 compared calls cannot promise" in output) == (1, True), output
    del config["cascades"]
    status, output = tuned(name)
    assert (status, "the configuration has none" in output) == (2, True), output
    assert tuned("other")[0] == 1, "a former cascade with compared calls"
