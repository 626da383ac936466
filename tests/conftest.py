"""Fixtures shared by several folders."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.children import TESTS, import_the_same_tree
from support.postgres import PostgresServer
from support.random_model import ensure_random_model
from support.redis_server import RedisServer
from support.scripted_gateway import ScriptedGateway
from support.serving import Serving

# A shell that starts us in the background has us ignore interrupts, and nohup hang-ups. What tests start would inherit
# that, and a gateway that is to ignore SIGHUP does not upgrade.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import_the_same_tree()

# The same examples everywhere, and as long for each as the machine takes. What else is set by now stays as it is.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

SLOW_FIRST = (
    "e2e",
    "engine",
    "contracts",
    "sim",
    "loadgen",
    "benchmarks",
    "cli",
    "properties",
    "simulation",
    "prediction",
)
"""The slowest folders. Processes take files from the front of the list, so that all end at about the same time."""
BOTH = (
    "admission",
    "ingress",
    "prediction",
    "runs",
    "scheduling",
    "streams",
    "workers/test_sse.py",
    "e2e/test_openai_client.py",
)
"""What `make test` runs compiled and in plain Python: packages on the path of a call, and code that exists in C too."""
ONCE = ("prediction/test_wait_model.py", "prediction/test_wait_model_in_simulator.py")
"""Long simulations that run once: the other tests of their folder cover the same decisions in both builds."""


PLAIN_PASS = "plain or both"
"""The marks of the pass in plain Python."""


def runs_in_both(path: Path) -> bool:
    name = path.relative_to(TESTS).as_posix()
    return name not in ONCE and (name in BOTH or name.partition("/")[0] in BOTH)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The pass in plain Python imports only files that it runs tests of: all of them take half a minute."""
    if config.getoption("markexpr") != PLAIN_PASS or not collection_path.name.startswith("test_"):
        return None
    return None if runs_in_both(collection_path) or "mark.plain" in collection_path.read_text() else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)

    items.sort(key=place)
    for item in items:
        if runs_in_both(item.path):
            item.add_marker("both")


def pytest_collection_finish() -> None:
    """What thousands of collected tests hold never becomes garbage: tests that collect garbage need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL server for all tests that leave it running."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """An empty database."""
    url = postgres.database()
    yield url
    postgres.drop(url)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis server of its own, without state."""
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new ledger, in SQLite and in PostgreSQL: every store passes the same tests with both."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    """One gateway for all tests that leave it as they found it."""
    with ScriptedGateway(tmp_path_factory.mktemp("scripted"), {"server": {"max_body_bytes": 1_000_000}}) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def short_timeout_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedGateway]:
    """One that waits only a moment for a body. For clients that never send it: a slow one might not make it in time."""
    with ScriptedGateway(tmp_path_factory.mktemp("impatient"), {"server": {"body_timeout_s": 0.3}}) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, made once for all tests."""
    return ensure_random_model(tmp_path_factory.getbasetemp() / "random-model")


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Serving]:
    """One gateway with the embedded engine behind it, as `inferry serve` makes it."""
    worker = {"name": "local", "kind": "embedded", "model": str(tiny_model), "models": ["tiny"]}
    with Serving(tmp_path_factory.mktemp("real"), config={"workers": [worker]}) as gateway:
        yield gateway
