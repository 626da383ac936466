"""Long histories: summaries are made in P2 beside live calls, used by later calls, and the original is kept."""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from inferry.domain.lanes import Lane
from support.scripted_worker import ScriptedWorker
from support.tenant_gateway import Answer, TenantGateway

CONTEXT = 3000
HISTORY = {"threshold": 0.5, "keep_messages": 2, "context_tokens": CONTEXT, "prompt": "Summarise."}


class HistoryGateway(TenantGateway):
    worker: ScriptedWorker

    def __init__(self, directory: Path, worker_context: int | None = None, **history: Any) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
            self.worker = ScriptedWorker(words=["They ", "met."], context_tokens=worker_context)
            return [self.worker], {}

        config: dict[str, Any] = {"auth": {"mode": "off"}, "histories": {"m": {**HISTORY, **history}}}
        config["routes"] = {"chosen": {"default": "m"}}
        config["workers"] = [{"name": "scripted", "kind": "vllm", "url": "http://127.0.0.1:1", "models": ["m"]}]
        super().__init__(directory, make, config)

    def chat(self, messages: list[Any], tenant: str = "a", model: str = "m", **headers: str) -> Answer:
        given = {"x-inferry-tenant": tenant, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self.call("POST", "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 8}, given)

    def sent(self) -> list[dict[str, Any]]:
        """The bodies that the worker was sent."""
        jobs = [job for plan in self.worker.plans for job in plan.jobs]
        return [json.loads(job.payload.body) for job in jobs]

    def summaries(self) -> list[dict[str, Any]]:
        return [body for body in self.sent() if body["messages"][0]["content"] == "Summarise."]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[HistoryGateway]:
    with HistoryGateway(tmp_path) as serving:
        yield serving


def conversation(turns: int, size: int = 1200) -> list[dict[str, str]]:
    """About `size / 2` bytes in each of two messages per turn, after a system message."""
    text = "word " * (size // 10)
    spoken = [{"role": role, "content": f"{turn} {text}"} for turn in range(turns) for role in ("user", "assistant")]
    return [{"role": "system", "content": "Be brief."}, *spoken, {"role": "user", "content": "And now?"}]


def until(condition: Callable[[], Any]) -> Any:
    for _ in range(6000):
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError("the condition never held")


def used(gateway: HistoryGateway, messages: list[Any], **headers: str) -> Answer:
    """The first answer that used a summary."""

    def answer() -> Answer | None:
        found = gateway.chat(messages, **headers)
        assert found.status == 200, found.body
        return found if "x-inferry-history" in found.headers else None

    found: Answer = until(answer)
    return found


def test_a_short_conversation_is_untouched(gateway: HistoryGateway) -> None:
    answer = gateway.chat(conversation(4, 200))
    assert answer.status == 200
    assert "x-inferry-history" not in answer.headers
    assert gateway.sent()[-1]["messages"] == conversation(4, 200)


def test_a_live_call_does_not_wait_and_later_calls_use_the_summary(gateway: HistoryGateway) -> None:
    messages = conversation(7)
    first = gateway.chat(messages, x_inferry_run_id="r")
    assert first.status == 200
    assert "x-inferry-history" not in first.headers, "the first call is served as it is"
    longer = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    answer = used(gateway, longer, x_inferry_run_id="r")
    id = answer.headers["x-inferry-history"]
    sent = gateway.sent()[-1]["messages"]
    assert sent[0] == messages[0]
    assert f"The original is stored as {id}" in sent[1]["content"]
    assert sent[1]["content"].endswith("They met.")
    assert sent[2:] == longer[-(len(sent) - 2) :]
    assert len(sent) < len(longer)
    assert len(gateway.summaries()) == 1, "one summary for the same prefix"
    (made,) = [job for plan in gateway.worker.plans for job in plan.jobs if b"Summarise." in job.payload.body]
    assert (made.lane, made.run_id, made.step_id, made.tenant) == (Lane.P2, "r", "history-summary", "a")


def test_the_original_is_kept_for_its_tenant_until_it_is_deleted(gateway: HistoryGateway) -> None:
    messages = conversation(7)
    id = used(gateway, messages).headers["x-inferry-history"]
    path, mine, other = f"/v1/histories/{id}", {"x-inferry-tenant": "a"}, {"x-inferry-tenant": "b"}
    found = gateway.call("GET", path, headers=mine).json
    assert found["messages"] == messages[: len(found["messages"])]
    assert (found["model"], found["summary"]) == ("m", "They met.")
    assert found["expires_at"] - found["created_at"] == 7 * 86_400
    assert gateway.call("GET", path, headers=other).status == 404
    assert gateway.call("DELETE", path, headers=other).status == 404
    assert gateway.call("DELETE", path, headers=mine).json["deleted"] is True
    assert gateway.call("GET", path, headers=mine).status == 404


def test_a_summarised_history_is_in_no_log_no_metric_and_no_row_but_its_own(
    gateway: HistoryGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canary-70fe31"
    messages = [{**one, "content": f"{canary} {one['content']}"} for one in conversation(7)]
    used(gateway, messages, x_inferry_run_id="r")
    mine = {"x-inferry-tenant": "a"}
    pages = [gateway.call("GET", f"/v1/runs/r{more}", None, mine) for more in ("", "/timeline")]
    pages += [gateway.call("GET", "/metrics"), gateway.as_admin("GET", "/admin/diagnosis")]
    assert [page.status for page in pages] == [200] * len(pages)
    assert canary.encode() not in b"".join(page.body for page in pages)
    assert canary not in caplog.text
    (database,) = tmp_path.glob("*.db")
    with closing(sqlite3.connect(database, timeout=60)) as reader:
        names = [name for (name,) in reader.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        holding = [name for name in names if canary in repr(reader.execute(f"SELECT * FROM {name}").fetchall())]
    assert holding == ["documents"], "the original, which its tenant may read and delete"


def test_a_summary_is_not_used_after_another_process_has_deleted_the_original(
    gateway: HistoryGateway, tmp_path: Path
) -> None:
    messages = conversation(7)
    used(gateway, messages)
    (database,) = tmp_path.glob("*.db")
    with closing(sqlite3.connect(database, timeout=60, isolation_level=None)) as other:
        assert other.execute("DELETE FROM documents WHERE kind = 'history'").rowcount == 1
    assert "x-inferry-history" not in gateway.chat(messages).headers
    until(lambda: len(gateway.summaries()) == 2)


def test_the_history_of_a_call_to_a_composed_model_is_that_of_the_model_it_chooses(gateway: HistoryGateway) -> None:
    messages = conversation(20)
    answer = gateway.chat(messages, model="chosen")
    assert (answer.status, answer.headers["x-inferry-path"]) == (200, "m")
    assert len(gateway.sent()[-1]["messages"]) < len(messages)
    assert len(gateway.summaries()) == 1


def test_tenants_do_not_share_summaries_and_a_call_may_opt_out(gateway: HistoryGateway) -> None:
    messages = conversation(7)
    used(gateway, messages)
    assert "x-inferry-history" not in gateway.chat(messages, x_inferry_history="off").headers
    assert gateway.sent()[-1]["messages"] == messages
    assert "x-inferry-history" not in gateway.chat(messages, tenant="b").headers


def test_a_stored_job_may_leave_its_history_as_it_is(gateway: HistoryGateway) -> None:
    messages = conversation(7)
    used(gateway, messages)
    job = {"endpoint": "/v1/chat/completions", "body": {"model": "m", "messages": messages, "max_tokens": 8}}
    headers = {"x-inferry-tenant": "a", "x-inferry-history": "off"}
    id = gateway.call("POST", "/v1/jobs", job, headers).json["id"]
    until(lambda: gateway.call("GET", f"/v1/jobs/{id}", None, headers).json["status"] == "completed")
    assert gateway.sent()[-1]["messages"] == messages


def test_a_call_that_does_not_fit_waits_for_its_summary(gateway: HistoryGateway) -> None:
    messages = conversation(20)
    answer = gateway.chat(messages)
    assert answer.status == 200
    assert "x-inferry-history" in answer.headers
    assert len(gateway.sent()[-1]["messages"]) < len(messages)


def test_a_call_that_does_not_fit_waits_within_its_deadline_and_then_goes_on_as_it_is(tmp_path: Path) -> None:
    with HistoryGateway(tmp_path, wait_s=0.05) as gateway:
        gateway.run(clear(gateway.worker))
        waiting: list[Answer] = []
        thread = threading.Thread(target=lambda: waiting.append(gateway.chat(conversation(20))))
        thread.start()
        until(lambda: len(gateway.worker.plans) >= 2)  # the summary, and after `wait_s` the call itself
        gateway.run(open_gate(gateway.worker))
        thread.join(60)
        assert waiting[0].status == 200
        assert "x-inferry-history" not in waiting[0].headers


def test_the_log_says_why_a_summary_failed_without_the_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        return [one.getMessage() for one in caplog.records if "was not summarised" in one.getMessage()]

    beyond: dict[str, Any] = {"threshold": 0.01, "max_summary_tokens": CONTEXT + 1}
    for count, history in enumerate(({"summary_model": "missing"}, beyond), 1):
        (tmp_path / str(count)).mkdir()
        with HistoryGateway(tmp_path / str(count), worker_context=CONTEXT, **history) as gateway:
            gateway.chat(conversation(7))
            while len(said()) < count:
                time.sleep(0.01)
    assert said()[0].startswith("a history was not summarised: the call of `missing` got 404, model_not_found: unknown")
    assert "the call of `m` got 400, context_length_exceeded: older messages, instruction and" in said()[1]
    assert "word" not in caplog.text


def test_a_summary_that_fails_changes_nothing(tmp_path: Path) -> None:
    with HistoryGateway(tmp_path, summary_model="missing") as gateway:
        messages = conversation(20)
        for _ in range(3):
            answer = gateway.chat(messages)
            assert answer.status == 200
            assert gateway.sent()[-1]["messages"] == messages
        assert "x-inferry-history" not in answer.headers


def test_only_the_named_tenants_have_summaries(tmp_path: Path) -> None:
    with HistoryGateway(tmp_path, tenants=["b"]) as gateway:
        assert "x-inferry-history" not in gateway.chat(conversation(20)).headers
        assert "x-inferry-history" in gateway.chat(conversation(20), tenant="b").headers


def test_a_summary_survives_a_restart(tmp_path: Path) -> None:
    with HistoryGateway(tmp_path) as gateway:
        used(gateway, conversation(7))
    with HistoryGateway(tmp_path) as gateway:
        used(gateway, conversation(7))
        assert not gateway.summaries(), "it was read from storage"


async def clear(worker: ScriptedWorker) -> None:
    worker.gate.clear()


async def open_gate(worker: ScriptedWorker) -> None:
    worker.gate.set()


def test_conversations_of_messages_and_responses_are_summarised_and_answered_in_their_format(
    gateway: HistoryGateway,
) -> None:
    """The translation to chat is the same in all APIs, so they find the same summary."""
    system, *spoken = conversation(5)
    by_api: dict[str, dict[str, Any]] = {
        "/v1/messages": {"system": system["content"], "messages": spoken, "max_tokens": 8},
        "/v1/responses": {"instructions": system["content"], "input": spoken, "max_output_tokens": 8, "store": False},
    }
    for path, body in by_api.items():
        tenant = {"x-inferry-tenant": path.rpartition("/")[2]}
        made = len(gateway.summaries())
        assert gateway.call("POST", path, {"model": "m", **body}, tenant).status == 200
        until(lambda made=made: len(gateway.summaries()) == made + 1)  # type: ignore[misc]

        def later(path: str = path, body: dict[str, Any] = body, tenant: dict[str, str] = tenant) -> Answer | None:
            answer = gateway.call("POST", path, {"model": "m", **body}, tenant)
            return answer if "x-inferry-history" in answer.headers else None

        answer = until(later)
        kind = answer.json.get("type", answer.json.get("object"))
        assert kind == ("message" if path == "/v1/messages" else "response")
        assert "They met." in answer.body.decode()
        sent = gateway.sent()[-1]["messages"]
        assert "earlier messages of this conversation were summarised" in json.dumps(sent)
        assert len(sent) < len(spoken)
        streamed = gateway.call("POST", path, {"model": "m", "stream": True, **body}, tenant)
        assert b"event: message_stop" in streamed.body or b"event: response.completed" in streamed.body
        off = gateway.call("POST", path, {"model": "m", **body}, {**tenant, "x-inferry-history": "off"})
        assert "x-inferry-history" not in off.headers


def test_a_chain_of_stored_responses_is_summarised_though_each_request_is_short(gateway: HistoryGateway) -> None:
    text, previous = "word " * 500, None
    for turn in range(3):
        body = {"model": "m", "input": f"{turn} {text}", "max_output_tokens": 8, "previous_response_id": previous}
        previous = gateway.call("POST", "/v1/responses", body).json["id"]

    def follow() -> bool:
        body = {"model": "m", "input": "And now?", "max_output_tokens": 8, "previous_response_id": previous}
        answer = gateway.call("POST", "/v1/responses", body)
        assert answer.status == 200, answer.body
        return "x-inferry-history" in answer.headers

    until(follow)
    assert "earlier messages of this conversation were summarised" in json.dumps(gateway.sent()[-1]["messages"])


def test_loops_of_tools_with_one_question_are_summarised_in_every_api(gateway: HistoryGateway) -> None:
    text = "word " * 120
    chat: list[Any] = [{"role": "user", "content": "Repair it."}]
    turns: list[Any] = [*chat]
    items: list[Any] = [*chat]
    for number in range(12):
        id, function = f"call_{number}", {"name": "read", "arguments": "{}"}
        chat.append(
            {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}
        )
        chat.append({"role": "tool", "tool_call_id": id, "content": text})
        turns.append({"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "read", "input": {}}]})
        turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})
        items.append({"type": "function_call", "call_id": id, **function})
        items.append({"type": "function_call_output", "call_id": id, "output": text})
    by_api: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": chat, "max_tokens": 8},
        "/v1/messages": {"messages": turns, "max_tokens": 8},
        "/v1/responses": {"input": items, "max_output_tokens": 8, "store": False},
    }
    for path, body in by_api.items():

        def later(path: str = path, body: dict[str, Any] = body) -> Answer | None:
            answer = gateway.call("POST", path, {"model": "m", **body}, {"x-inferry-tenant": path.rpartition("/")[2]})
            assert answer.status == 200, answer.body
            return answer if "x-inferry-history" in answer.headers else None

        until(later)
        marker, *rest = gateway.sent()[-1]["messages"]
        assert "23 earlier messages" in marker["content"]
        assert [one["role"] for one in rest] == ["assistant", "tool"]
        assert rest[0]["tool_calls"][0]["id"] == rest[1]["tool_call_id"] == "call_11"
