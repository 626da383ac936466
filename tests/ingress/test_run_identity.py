"""Run identity: `x-inferry-*` headers, and those of agent harnesses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.domain.errors import InvalidRequest
from inferry.domain.values import replace
from inferry.ingress.run_identity import RunIdentity, identity
from inferry.runs.registry import RunRegistry
from support.builders import a_job

CLAUDE = b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"
CODEX = b"session_id", b"session-id", b"thread-id", b"x-codex-parent-thread-id"
OPENCODE = b"x-session-id", b"x-parent-session-id"
OURS = b"x-inferry-run-id", b"x-inferry-step-id", b"x-inferry-parent-run-id"


def test_a_call_without_ids_is_a_run_of_its_own() -> None:
    assert identity({}, "job") == RunIdentity("job", "job", None, None)


def test_our_own_headers_are_taken_as_they_are() -> None:
    named = dict(zip(OURS, (b"run", b"step", b"parent"), strict=True))
    assert identity(named, "job") == RunIdentity("run", "step", "parent", None)


def test_our_run_id_wins_over_a_harness_and_the_session_stays_a_hint() -> None:
    headers = {b"x-inferry-run-id": b"run", CLAUDE[0]: b"s", CLAUDE[1]: b"a"}
    assert identity(headers, "job") == RunIdentity("run", "job", None, "claude-code:s")


def test_claude_codes_session_is_a_run_and_its_agents_are_sub_runs() -> None:
    main = identity({CLAUDE[0]: b"s"}, "job")
    agent = identity({CLAUDE[0]: b"s", CLAUDE[1]: b"a"}, "job")
    nested = identity({CLAUDE[0]: b"s", CLAUDE[1]: b"b", CLAUDE[2]: b"a"}, "job")
    assert (main.run_id, main.parent_run) == ("claude-code:s", None)
    assert (agent.run_id, agent.parent_run) == ("claude-code:s/a", "claude-code:s")
    assert (nested.run_id, nested.parent_run) == ("claude-code:s/b", "claude-code:s/a")
    assert main.session == agent.session == nested.session == "claude-code:s"


def test_agents_of_one_name_in_two_sessions_are_two_runs() -> None:
    one, other = (identity({CLAUDE[0]: session, CLAUDE[1]: b"reviewer@team"}, "job") for session in (b"s", b"t"))
    assert one.run_id != other.run_id


def test_codex_threads_belong_to_the_thread_that_started_them_or_to_their_session() -> None:
    first = identity({b"session_id": b"s", b"thread-id": b"s"}, "job")
    older = identity({b"session_id": b"s"}, "job")
    other = identity({b"session-id": b"s", b"thread-id": b"t"}, "job")
    child = identity({b"session-id": b"s", b"thread-id": b"u", b"x-codex-parent-thread-id": b"t"}, "job")
    assert first == RunIdentity("codex:s", "job", None, first.session)
    assert older == RunIdentity("codex:s", "job", None, older.session)
    assert (other.run_id, other.parent_run) == ("codex:t", "codex:s")
    assert (child.run_id, child.parent_run, child.session) == ("codex:u", "codex:t", "codex:s")


def test_opencodes_sub_agents_are_sessions_with_a_parent() -> None:
    main = identity({b"x-session-id": b"ses_a"}, "job")
    child = identity({b"x-session-id": b"ses_b", b"x-parent-session-id": b"ses_a"}, "job")
    assert (main.run_id, main.parent_run) == ("session:ses_a", None)
    assert (child.run_id, child.parent_run) == ("session:ses_b", "session:ses_a")


def test_an_orchestrator_owns_a_harness_session_by_our_parent_header() -> None:
    ours = {b"x-inferry-parent-run-id": b"nightly"}
    assert identity({CLAUDE[0]: b"s"} | ours, "job").parent_run == "nightly"
    # Its agents stay below their session, which is below the orchestrator's run.
    assert identity({CLAUDE[0]: b"s", CLAUDE[1]: b"a"} | ours, "job").parent_run == "claude-code:s"


@pytest.mark.parametrize("bad", [b"", b"with space", b"\xff", b"x" * 101, b"a/b", b"a\tb"])
def test_a_malformed_harness_header_is_passed_over(bad: bytes) -> None:
    assert identity({CLAUDE[0]: bad}, "job").run_id == "job"
    assert identity({CLAUDE[0]: b"s", CLAUDE[1]: bad}, "job").run_id == "claude-code:s"
    assert identity({CLAUDE[0]: b"s", CLAUDE[1]: b"a", CLAUDE[2]: bad}, "job").parent_run == "claude-code:s"
    assert identity({b"x-session-id": bad}, "job").run_id == "job"


@pytest.mark.parametrize("name", OURS)
def test_a_malformed_header_of_ours_is_refused_by_name(name: bytes) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        identity({name: b"two words"}, "job")
    assert refusal.value.param == name.decode()


_values = st.one_of(st.sampled_from([b"a", b"b", b"s"]), st.binary(max_size=120))


@given(st.dictionaries(st.sampled_from(CLAUDE + CODEX + OPENCODE), _values))
def test_no_harness_header_makes_an_error_or_a_run_that_is_its_own_parent(headers: dict[bytes, bytes]) -> None:
    found = identity(headers, "job")
    assert found.parent_run != found.run_id
    for one in (found.run_id, found.step_id, found.parent_run, found.session):
        assert one is None or (len(one) <= 256 and one.isascii() and one.isprintable() and " " not in one)
    job = replace(a_job("job", run_id=found.run_id), parent_run=found.parent_run)
    RunRegistry().admit(job, 0.0)
