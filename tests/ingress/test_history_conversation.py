"""Where a conversation is cut for a summary, and how it reads with one."""

import json
from typing import Any

import msgspec
from msgspec import Raw

from inferry.ingress.histories.conversation import (
    HistorySettings,
    Summary,
    cut_at,
    prefix_ids,
    summary_request,
    with_summary,
)


def raw(*messages: Any) -> list[Raw]:
    return [Raw(msgspec.json.encode(message)) for message in messages]


def said(role: str, content: str = "x") -> dict[str, str]:
    return {"role": role, "content": content}


def chat(roles: str) -> list[Raw]:
    """A conversation of system, user, assistant and tool messages by their first letters."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return raw(*(said(names[letter], f"{letter}{index}") for index, letter in enumerate(roles)))


def step(*ids: str) -> dict[str, Any]:
    """A message of the assistant that calls tools."""
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": id, "content": "x"}


def test_the_rest_begins_with_a_user_and_has_the_kept_messages() -> None:
    assert cut_at(chat("suauaua"), 2, 0) == 5
    assert cut_at(chat("suauaua"), 3, 0) == 3
    assert cut_at(chat("suatatuata"), 2, 0) == 6


def test_a_loop_of_tools_is_cut_before_a_step() -> None:
    """An agent works for long on one message of the user: without this cut its history is never summarised."""
    assert cut_at(chat("suatata"), 2, 0) == 4
    assert cut_at(chat("suatatat"), 2, 0) == 6
    assert cut_at(chat("suatatat"), 2, 6) is None
    assert cut_at(chat("suat"), 2, 0) is None, "the first step stays with the question"


def test_results_stay_with_the_calls_that_they_answer() -> None:
    parallel = raw(said("user"), step("1"), result("1"), step("2", "3"), result("2"), result("3"), step("4"))
    assert [cut_at(parallel, keep, 0) for keep in (1, 2, 3, 4)] == [6, 3, 3, 3]
    late = raw(said("user"), step("1"), result("1"), step("2", "3"), result("2"), said("user"), result("3"))
    assert cut_at(late, 2, 0) == 3, "a result behind another message"
    repeated = raw(said("user"), step("1"), result("1"), step("1"), result("1"), step("1"), result("1"))
    assert cut_at(repeated, 2, 0) == 5, "ids that a model uses again"
    orphan = raw(said("user"), step("1"), result("1"), step("2"), result("2"), result("unknown"), said("user"))
    assert cut_at(orphan, 2, 0) == 3


def test_nothing_is_covered_twice_or_without_messages() -> None:
    assert cut_at(chat("suauaua"), 2, 5) is None
    assert cut_at(chat("su"), 8, 0) is None
    assert cut_at(chat("suau"), 1, 1) == 3
    assert cut_at([], 1, 0) is None


def test_ids_name_a_prefix_of_one_tenant_and_model() -> None:
    first, longer = prefix_ids("a", "m", chat("sua")), prefix_ids("a", "m", chat("suaua"))
    assert longer[:3] == first
    assert len({*longer}) == 5
    assert not {*longer} & {*prefix_ids("b", "m", chat("suaua"))}
    assert not {*longer} & {*prefix_ids("a", "other", chat("suaua"))}
    moved = prefix_ids("a", "m", [Raw(b'"ab"'), Raw(b'"c"')])[1]
    assert moved != prefix_ids("a", "m", [Raw(b'"a"'), Raw(b'b"c"')])[1]


def test_a_marker_says_what_was_summarised_and_where_the_original_is() -> None:
    rewritten = [json.loads(bytes(one)) for one in with_summary(chat("suaua"), Summary("hist_1", 3, "They met."))]
    assert [one["role"] for one in rewritten] == ["system", "user", "user", "assistant"]
    assert rewritten[1]["content"] == (
        "[2 earlier messages of this conversation were summarised to save context. "
        "The original is stored as hist_1. Summary:]\nThey met."
    )
    assert rewritten[2]["content"] == "u3"


def test_a_later_summary_continues_the_earlier_one() -> None:
    settings = HistorySettings(prompt="Summarise.")
    first = [json.loads(bytes(one)) for one in summary_request(chat("suauau"), None, 3, settings)]
    assert first[0] == {"role": "system", "content": "Summarise."}
    assert "u1" in first[1]["content"]
    assert "s0" not in first[1]["content"], "system messages stay"
    known = Summary("hist_1", 3, "They met.")
    later = json.loads(bytes(summary_request(chat("suauau"), known, 5, settings)[1]))["content"]
    assert later.startswith("Summary of what came before: They met.")
    assert "u3" in later
    assert "u1" not in later
