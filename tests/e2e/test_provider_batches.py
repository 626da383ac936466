"""Items of batches that a hosted provider executes through its batch API, with the official clients on both sides."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai.types import Batch

from support.killed_batches import Gateway
from support.scripted_provider import ScriptedProvider
from support.waiting import until

CHAT: Final = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def provider() -> Iterator[ScriptedProvider]:
    with ScriptedProvider() as provider:
        yield provider


class Site:
    """A gateway process whose worker has a batch API. `kill` ends it as `kill -9` does, `start` starts another."""

    def __init__(self, directory: Path, provider: ScriptedProvider, api: str, **config: Any) -> None:
        self.directory = directory
        worker: dict[str, Any] = {
            "kind": "openai",
            "name": "hosted",
            "url": provider.url,
            "models": ["m"],
            "api_key": "secret",
        }
        worker |= {"batch_api": api, "batch_price_factor": 0.5}
        self._config = {"workers": [worker], **config}
        self._provider = provider
        self.start()

    def start(self) -> None:
        self.gateway = Gateway(self.directory, self._provider.url, **self._config)
        self.openai = OpenAI(base_url=self.gateway.url + "/v1", api_key="unused", timeout=60)
        self.anthropic = Anthropic(base_url=self.gateway.url, api_key="unused", timeout=60)

    def kill(self) -> None:
        self.openai.close()
        self.anthropic.close()
        self.gateway.popen.kill()
        self.gateway.popen.wait()

    def create(self, count: int, model: Callable[[int], str] = lambda number: "m") -> str:
        lines = [
            {
                "custom_id": f"r{number}",
                "method": "POST",
                "url": CHAT,
                "body": {"model": model(number), "messages": [{"role": "user", "content": f"question {number}"}]},
            }
            for number in range(count)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        file = self.openai.files.create(file=("in.jsonl", content.encode()), purpose="batch")
        batch = self.openai.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        return batch.id

    def create_messages(self, count: int) -> str:
        params: Any = [
            {
                "custom_id": f"r{number}",
                "params": {
                    "model": "m",
                    "max_tokens": 9,
                    "messages": [{"role": "user", "content": f"question {number}"}],
                },
            }
            for number in range(count)
        ]
        return self.anthropic.messages.batches.create(requests=params).id

    def finished(self, id: str) -> Batch:
        until(lambda: self.openai.batches.retrieve(id).status in OVER)
        return self.openai.batches.retrieve(id)

    def lines(self, file: str | None) -> dict[str, dict[str, Any]]:
        if file is None:
            return {}
        found = [json.loads(line) for line in self.openai.files.content(file).text.splitlines()]
        return {line["custom_id"]: line for line in found}

    def rows(self) -> list[tuple[Any, ...]]:
        """Job, worker, prompt, cached and output tokens and cost of every row of the ledger."""
        query = "SELECT job_id, worker, prompt_tokens, cached_tokens, output_tokens, cost_nanos FROM attempts"
        with closing(sqlite3.connect(self.directory / "inferry.db")) as database:
            return list(database.execute(query))


@pytest.fixture
def site(tmp_path: Path, provider: ScriptedProvider) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def start(api: str, **config: Any) -> Site:
        sites.append(Site(tmp_path, provider, api, **config))
        return sites[-1]

    yield start
    for one in sites:
        one.kill()


def test_openai_items_are_one_provider_batch_at_the_batch_price(
    site: Callable[..., Site], provider: ScriptedProvider
) -> None:
    here = site("openai")
    batch = here.finished(here.create(30))
    assert (batch.status, batch.request_counts and batch.request_counts.completed) == ("completed", 30)
    lines = here.lines(batch.output_file_id)
    assert list(lines) == [f"r{number}" for number in range(30)]
    for number in range(30):
        response = lines[f"r{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == f"echo question {number}"
    assert len(provider.batches) == 1
    assert not provider.as_calls
    assert provider.headers[0]["Authorization"] == "Bearer secret"
    rows = here.rows()
    assert len(rows) == 30
    # 10 prompt tokens at 1 and 5 output tokens at 2 per million, at half the price.
    assert {row[1:] for row in rows} == {("hosted", 10, 0, 5, 10_000)}


def test_anthropic_items_are_one_message_batch(site: Callable[..., Site], provider: ScriptedProvider) -> None:
    here = site("anthropic")
    provider.fails = {"question 3": 400}
    id = here.create_messages(20)
    until(lambda: here.anthropic.messages.batches.retrieve(id).processing_status == "ended")
    found = {one.custom_id: one.result for one in here.anthropic.messages.batches.results(id)}
    assert [found[f"r{number}"].type for number in range(20)].count("succeeded") == 19
    assert found["r3"].type == "errored"
    first = found["r0"]
    assert first.type == "succeeded"
    assert first.message.content[0].type == "text"
    assert first.message.content[0].text == "echo question 0"
    assert len(provider.message_batches) == 1
    assert provider.headers[0]["x-api-key"] == "secret"
    assert sorted({row[2:] for row in here.rows()}) == [(0, 0, 0, 0), (10, 2, 5, 10_000)]


def test_items_of_other_models_and_items_that_fail_for_a_moment_are_calls(
    site: Callable[..., Site], provider: ScriptedProvider
) -> None:
    here = site("openai")
    provider.fails = {"question 1": 500, "question 2": 400}
    batch = here.finished(here.create(4, lambda number: "other" if number == 3 else "m"))
    good, bad = here.lines(batch.output_file_id), here.lines(batch.error_file_id)
    assert set(good) == {"r0", "r1"}
    assert {key: line["response"]["status_code"] for key, line in bad.items()} == {"r2": 400, "r3": 404}
    assert provider.as_calls == {"question 1": 1}


def test_a_batch_that_the_provider_refuses_is_executed_as_calls(
    site: Callable[..., Site], provider: ScriptedProvider
) -> None:
    here = site("openai")
    provider.refuses = True
    batch = here.finished(here.create(5))
    assert batch.status == "completed"
    assert len(here.lines(batch.output_file_id)) == 5
    assert sum(provider.as_calls.values()) == 5


def test_tenants_with_ceilings_are_executed_as_calls(site: Callable[..., Site], provider: ScriptedProvider) -> None:
    here = site("openai", tenants={"default": {"day_token_ceiling": 1_000_000}})
    assert here.finished(here.create(3)).status == "completed"
    assert not provider.batches
    assert sum(provider.as_calls.values()) == 3


@pytest.mark.parametrize("loses_answer", [False, True], ids=["answered", "answer lost"])
def test_a_killed_gateway_continues_the_provider_batch_it_has(
    site: Callable[..., Site], provider: ScriptedProvider, loses_answer: bool
) -> None:
    here = site("openai")
    provider.is_holding = True
    provider.loses_answers = int(loses_answer)
    id = here.create(12)
    until(lambda: len(provider.batches) == 1)
    here.kill()
    here.start()
    time.sleep(2.0)  # whatever it would submit again, it submits now
    provider.release()
    batch = here.finished(id)
    assert batch.status == "completed"
    assert len(here.lines(batch.output_file_id)) == 12
    assert len(provider.batches) == 1
    assert set(provider.executed.values()) == {1}
    assert len(here.rows()) == 12


def test_a_message_batch_whose_answer_was_lost_is_not_submitted_again(
    site: Callable[..., Site], provider: ScriptedProvider
) -> None:
    here = site("anthropic")
    provider.is_holding = True
    provider.loses_answers = 1
    id = here.create_messages(7)
    until(lambda: len(provider.message_batches) == 1)
    here.kill()
    here.start()
    time.sleep(2.0)
    assert len(provider.message_batches) == 1
    provider.release()
    until(lambda: here.anthropic.messages.batches.retrieve(id).processing_status == "ended")
    assert here.anthropic.messages.batches.retrieve(id).request_counts.succeeded == 7
    assert len(provider.message_batches) == 1
    assert set(provider.executed.values()) == {1}


@pytest.mark.parametrize("is_killed", [False, True], ids=["running", "killed"])
def test_a_cancelled_batch_cancels_the_providers(
    site: Callable[..., Site], provider: ScriptedProvider, is_killed: bool
) -> None:
    here = site("openai")
    provider.is_holding = True
    id = here.create(6)
    until(lambda: len(provider.batches) == 1)
    here.openai.batches.cancel(id)
    if is_killed:
        here.kill()
        here.start()
    batch = here.finished(id)
    assert batch.status == "cancelled"
    assert provider.cancelled == list(provider.batches)
    errors = here.lines(batch.error_file_id)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    assert len(errors) == 6
    assert not provider.executed


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_what_expires_at_the_provider_has_expired(
    site: Callable[..., Site], provider: ScriptedProvider, api: str
) -> None:
    here = site(api)
    provider.is_holding = True
    if api == "openai":
        id = here.create(4)
        until(lambda: len(provider.batches) == 1)
        provider.release("expired")
        batch = here.finished(id)
        assert batch.status == "expired"
        assert {line["error"]["code"] for line in here.lines(batch.error_file_id).values()} == {"batch_expired"}
    else:
        id = here.create_messages(4)
        until(lambda: len(provider.message_batches) == 1)
        provider.release("expired")
        until(lambda: here.anthropic.messages.batches.retrieve(id).processing_status == "ended")
        assert here.anthropic.messages.batches.retrieve(id).request_counts.expired == 4
    assert not provider.as_calls
