"""The documentation says what the code does: pages are fresh, links lead somewhere, examples work."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from inferry.cli import docs
from inferry.cli.config import schema
from inferry.cli.config.loader import parse
from inferry.cli.config.schema import Config, LaneConfig, ServerConfig
from inferry.cli.config.workers import EmbeddedWorkerConfig, VllmWorkerConfig
from inferry.cli.config_page import config_page, example_config
from inferry.cli.markdown import attribute_docs
from inferry.cli.metrics_page import metrics_page
from inferry.domain import errors
from inferry.domain.errors import GatewayError
from inferry.domain.lanes import Lane
from inferry.observe.metric_table import METRIC_TABLE

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
SHELL = {"", "bash", "sh", "console", "yaml"}
COMMANDS = dict(docs.commands())
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


pages = pytest.mark.parametrize("path", PAGES, ids=page_name)


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def fenced(path: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(path.read_text()) if language in languages]


def headings(path: Path) -> set[str]:
    """The anchors that a page's headings have where Markdown is shown."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def code_lines(path: Path) -> Iterator[str]:
    """Whatever a reader may take for a command: code in the text, and lines of shell and YAML blocks."""
    yield from SPAN.findall(prose(path))
    for block in fenced(path, *SHELL):
        yield from block.replace("\\\n", " ").splitlines()


def words_after(name: str, line: str) -> list[str] | None:
    """The words after a command's name, up to where another command or a comment begins."""
    words = [word.strip("\"',[]") for word in line.split()]
    for at, word in enumerate(words):
        if word == name or word.endswith("/" + name):
            rest = words[at + 1 :]
            ends = [i for i, one in enumerate(rest) if one in {"|", "&&", "&", ">", ";", "#"} or one.startswith("#")]
            return rest[: min(ends, default=len(rest))]
    return None


# -- the generated pages ---------------------------------------------------------------------------------------------


def test_the_generated_pages_are_up_to_date() -> None:
    assert docs.stale(docs.REFERENCE) == [], "run `make docs`"


def test_a_stale_page_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--directory", str(tmp_path)]) == 0
    assert docs.main(["--check", "--directory", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "errors.md").write_text("old")
    (tmp_path / "cli.md").unlink()
    assert docs.main(["--check", "--directory", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "stale, run `make docs`: errors.md, cli.md\n"
    assert (tmp_path / "errors.md").read_text() == "old", "checking writes nothing"


@pytest.mark.parametrize("columns", ["20", "300"])
def test_pages_do_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    before = docs.pages()
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERMINAL_WIDTH", columns)
    assert docs.pages() == before


def test_every_key_is_in_the_configuration_page() -> None:
    page = config_page()
    for section in (ServerConfig, EmbeddedWorkerConfig, VllmWorkerConfig):
        prefix = "server." if section is ServerConfig else ""
        assert all(f"| `{prefix}{key}` |" in page for key in section.__struct_fields__)
    assert all(f"| `lanes.<lane>.{key}` |" in page for key in LaneConfig.__struct_fields__)


def test_the_complete_example_names_every_key_and_works() -> None:
    raw = yaml.safe_load(example_config())
    assert set(raw) == set(Config.__struct_fields__)
    assert set(raw["lanes"]) == set(Lane.__members__)
    parsed = parse(raw)
    assert [worker.name for worker in parsed.workers] == ["local", "gpu-a", "gpu-c"]
    assert example_config() in config_page()


def test_every_metric_is_on_its_page() -> None:
    assert all(f"`{metric.name}`" in metrics_page() for metric in METRIC_TABLE)


ERRORS = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GatewayError)}


def test_the_error_table_holds_exactly_the_errors_of_the_domain() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| `\w+` \| (yes|no) \|", page, re.MULTILINE)
    assert {(int(status), code, retryable == "yes") for status, code, retryable in rows} == {
        (kind.status, kind.code, kind.retryable) for kind in ERRORS
    }
    assert {("504", "request_timeout", "no"), ("504", "deadline_exceeded", "no")} <= set(rows)


@pages
def test_a_status_and_a_code_named_together_are_those_of_one_error(path: Path) -> None:
    named = {(int(status), code) for status, code in re.findall(r"\b([45]\d\d) `([a-z_]+)`", prose(path))}
    assert named <= {(kind.status, kind.code) for kind in ERRORS}


def test_text_under_an_attribute_is_read_from_the_source() -> None:
    assert attribute_docs(schema)["ServerConfig", "port"] == "Port to listen on; 0 selects a free one."


# -- all pages -------------------------------------------------------------------------------------------------------


def test_there_are_pages_of_all_four_kinds() -> None:
    for kind in ("tutorial", "howto", "reference", "explanation"):
        assert list((ROOT / "docs" / kind).glob("*.md")), kind


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    assert {path for path in PAGES if path.is_relative_to(ROOT / "docs") and "adr" not in path.parts} - linked == {
        index
    }


@pages
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(prose(path)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert there.is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor and there.suffix == ".md":
            assert anchor in headings(there), target


def test_every_file_of_where_it_is_decided_exists_and_has_what_is_named_with_it() -> None:
    page = (ROOT / "docs" / "explanation" / "path-of-a-call.md").read_text()
    rows = page.split("## Where it is decided\n")[1].split("\n## ")[0].splitlines()
    named = [row for row in rows if re.match(r"\| (?!question|---)", row)]
    assert len(named) > 50
    for row in named:
        folder = ""
        for file, name in re.findall(r"`([\w/]+\.py)`(?:, `(\w+)`)?", row):
            folder = folder or file.rpartition("/")[0]
            path = ROOT / "src" / "inferry" / (file if "/" in file else f"{folder}/{file}")
            assert path.is_file(), f"{file}: {row}"
            assert re.search(rf"\b{name}\b", path.read_text()), f"{name}: {row}"


@pages
def test_configurations_can_be_used(path: Path) -> None:
    for block in fenced(path, "yaml"):
        raw = yaml.safe_load(block)
        if isinstance(raw, dict) and set(raw) & set(Config.__struct_fields__):
            parse(raw)


@pages
def test_commands_exist_with_their_options(path: Path) -> None:
    for line in code_lines(path):
        words = words_after("inferry", line)
        if words is None:
            continue
        name = "inferry"
        for word in words:
            if word.startswith("-"):
                known = {spelling for spellings, _ in docs.options(COMMANDS[name]) for spelling in spellings}
                assert word.split("=")[0] in known | {"--help"}, line
            elif f"{name} {word}" in COMMANDS:
                name = f"{name} {word}"
            else:
                group = hasattr(COMMANDS[name], "commands")
                assert not group or not re.fullmatch(r"[a-z-]+", word), f"no such command: {line}"


@pages
def test_make_targets_exist(path: Path) -> None:
    for line in code_lines(path):
        if re.match(r"(\$ )?make( |$)", line):
            named = [word for word in words_after("make", line) or [] if re.fullmatch(r"[a-z]+", word)]
            assert set(named) <= TARGETS, line


@pages
def test_pages_are_plain_text(path: Path) -> None:
    text = path.read_text()
    assert "\t" not in text
    assert not re.search(r"/(home|work|root|tmp)/", text), "no paths of somebody's machine"


def test_the_defaults_of_lanes_are_values_that_the_configuration_takes() -> None:
    rows = [line.split("|") for line in config_page().splitlines() if line.startswith("| `lanes.<lane>.")]
    assert rows
    for column, lane in enumerate(Lane, 3):
        given = {row[1].strip(" `").rpartition(".")[2]: yaml.safe_load(row[column].strip(" `")) for row in rows}
        assert parse({"lanes": {lane.name: given}}).lane_policies() == parse({}).lane_policies()
