"""A hosted provider with OpenAI's files and batches and Anthropic's message batches, on a thread of its own.

Every answer is validated with the models of the provider's SDK. A batch ends when `release` is called, or at once where
`is_holding` is false.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from openai.types import Batch, FileObject
from openai.types.chat import ChatCompletion

NOW = 1_800_000_000
Outcome = Callable[[str], dict[str, Any]]


class ScriptedProvider:
    """`executed` counts prompts that were executed, in batches and as calls; `created` has the bodies of batches.

    `loses_answers`: the next creations of batches succeed and are not answered. `fails`: prompts that are answered with
    this status. `refuses`: creations are refused with 400.
    """

    def __init__(self) -> None:
        self.is_holding = False
        self.loses_answers = 0
        self.refuses = False
        self.fails: dict[str, int] = {}
        self.executed: Counter[str] = Counter()
        self.as_calls: Counter[str] = Counter()
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.message_batches: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, list[dict[str, Any]]] = {}
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.headers: list[dict[str, str]] = []
        self.cancelled: list[str] = []
        self.url = ""
        self._number = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/files", self._create_file)
        app.router.add_get("/v1/files/{id}/content", self._file_content)
        app.router.add_post("/v1/batches", self._create_batch)
        app.router.add_get("/v1/batches", self._list_batches)
        app.router.add_get("/v1/batches/{id}", self._get_batch)
        app.router.add_post("/v1/batches/{id}/cancel", self._cancel_batch)
        app.router.add_post("/v1/messages/batches", self._create_message_batch)
        app.router.add_get("/v1/messages/batches", self._list_message_batches)
        app.router.add_get("/v1/messages/batches/{id}", self._get_message_batch)
        app.router.add_get("/v1/messages/batches/{id}/results", self._message_results)
        app.router.add_post("/v1/messages/batches/{id}/cancel", self._cancel_message_batch)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def _id(self, prefix: str) -> str:
        self._number += 1
        return f"{prefix}{self._number}"

    def release(self, outcome: str = "succeeded") -> None:
        """End all batches: execute their requests, or let them expire."""
        for id in list(self.batches):
            self._end_batch(id, outcome)
        for id in list(self.message_batches):
            self._end_message_batch(id, outcome)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "created": 1}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["messages"][-1]["content"]
        if prompt != "ping":  # the gateway's own probe
            self.executed[prompt] += 1
            self.as_calls[prompt] += 1
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in (
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": f"echo {prompt}"}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}},
        ):
            head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            await response.write(b"data: " + json.dumps({**head, **event}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # -- OpenAI ------------------------------------------------------------------------------------------------------

    async def _create_file(self, request: web.Request) -> web.Response:
        form = await request.post()
        assert form["purpose"] == "batch"
        file = form["file"]
        assert isinstance(file, web.FileField)
        id = self._id("file-")
        self.files[id] = file.file.read()
        answer = {
            "id": id,
            "object": "file",
            "bytes": len(self.files[id]),
            "created_at": NOW,
            "filename": file.filename,
            "purpose": "batch",
            "status": "processed",
        }
        FileObject.model_validate(answer)
        return web.json_response(answer)

    async def _file_content(self, request: web.Request) -> web.Response:
        return web.Response(body=self.files[request.match_info["id"]])

    async def _create_batch(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.headers.append(dict(request.headers))
        if self.refuses:
            return web.json_response({"error": {"message": "billing", "code": "billing_hard_limit"}}, status=400)
        assert set(body) == {"input_file_id", "endpoint", "completion_window", "metadata"}
        assert body["completion_window"] == "24h"
        id = self._id("batch_")
        lines = [json.loads(line) for line in self.files[body["input_file_id"]].splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        assert all(line["method"] == "POST" and line["url"] == body["endpoint"] for line in lines)
        self.requests[id] = lines
        counts = {"total": len(lines), "completed": 0, "failed": 0}
        self.batches[id] = {**body, "id": id, "object": "batch", "status": "in_progress", "created_at": NOW}
        self.batches[id] |= {"request_counts": counts, "output_file_id": None, "error_file_id": None, "errors": None}
        if not self.is_holding:
            self._end_batch(id, "succeeded")
        return self._answer(request, self._batch(id))

    def _batch(self, id: str) -> dict[str, Any]:
        Batch.model_validate(self.batches[id])
        return self.batches[id]

    def _answer(self, request: web.Request, answer: dict[str, Any]) -> web.Response:
        if self.loses_answers:
            self.loses_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(answer)

    async def _list_batches(self, request: web.Request) -> web.Response:
        ids = list(reversed(self.batches))
        after = request.query.get("after")
        ids = ids[ids.index(after) + 1 :] if after else ids
        limit = int(request.query["limit"])
        page = [self._batch(id) for id in ids[:limit]]
        return web.json_response({"object": "list", "data": page, "has_more": len(ids) > limit})

    async def _get_batch(self, request: web.Request) -> web.Response:
        return web.json_response(self._batch(request.match_info["id"]))

    async def _cancel_batch(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        self.cancelled.append(id)
        self._end_batch(id, "canceled")
        return web.json_response(self._batch(id))

    def _end_batch(self, id: str, outcome: str) -> None:
        batch = self.batches[id]
        if batch["status"] != "in_progress":
            return
        output: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        for line in self.requests[id]:
            prompt = line["body"]["messages"][-1]["content"]
            result: dict[str, Any] = {"id": self._id("batch_req_"), "custom_id": line["custom_id"], "error": None}
            if outcome == "succeeded":
                status = self.fails.get(prompt, 200)
                self.executed[prompt] += 1
                answer = _completion(prompt) if status == 200 else {"error": {"message": "no", "type": "t"}}
                result["response"] = {"status_code": status, "request_id": "req-1", "body": answer}
                (output if status == 200 else errors).append(result)
            elif outcome == "expired":
                errors.append({**result, "response": None, "error": {"code": "batch_expired", "message": "late"}})
        for name, lines in (("output_file_id", output), ("error_file_id", errors)):
            if lines:
                batch[name] = self._id("file-")
                self.files[batch[name]] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        batch["status"] = {"succeeded": "completed", "canceled": "cancelled"}.get(outcome, outcome)

    # -- Anthropic ---------------------------------------------------------------------------------------------------

    async def _create_message_batch(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.headers.append(dict(request.headers))
        assert request.headers["anthropic-version"]
        assert set(body) == {"requests"}
        id = self._id("msgbatch_")
        self.requests[id] = body["requests"]
        created = datetime.fromtimestamp(NOW, UTC)
        counts = {"processing": len(body["requests"]), "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
        self.message_batches[id] = {
            "id": id,
            "type": "message_batch",
            "processing_status": "in_progress",
            "request_counts": counts,
            "created_at": created.isoformat(),
            "expires_at": (created + timedelta(days=1)).isoformat(),
            "results_url": None,
        }
        if not self.is_holding:
            self._end_message_batch(id, "succeeded")
        return self._answer(request, self._message_batch(id))

    def _message_batch(self, id: str) -> dict[str, Any]:
        MessageBatch.model_validate(self.message_batches[id])
        return self.message_batches[id]

    async def _list_message_batches(self, request: web.Request) -> web.Response:
        page = [self._message_batch(id) for id in reversed(self.message_batches)]
        ids = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return web.json_response({"data": page, "has_more": False, **ids})

    async def _get_message_batch(self, request: web.Request) -> web.Response:
        return web.json_response(self._message_batch(request.match_info["id"]))

    async def _message_results(self, request: web.Request) -> web.Response:
        lines = self.results[request.match_info["id"]]
        for line in lines:
            MessageBatchIndividualResponse.model_validate(line)
        return web.Response(body=b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    async def _cancel_message_batch(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        self.cancelled.append(id)
        self._end_message_batch(id, "canceled")
        return web.json_response(self._message_batch(id))

    def _end_message_batch(self, id: str, outcome: str) -> None:
        batch = self.message_batches[id]
        if batch["processing_status"] == "ended":
            return
        lines = self.results[id] = []
        for line in reversed(self.requests[id]):  # results have an order of their own
            prompt = line["params"]["messages"][-1]["content"]
            result: dict[str, Any] = {"type": outcome}
            if outcome == "succeeded" and prompt in self.fails:
                kind = "overloaded_error" if self.fails[prompt] >= 500 else "invalid_request_error"
                error = {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req-1"}
                result = {"type": "errored", "error": error}
            elif outcome == "succeeded":
                self.executed[prompt] += 1
                result["message"] = _message(prompt)
            batch["request_counts"][result["type"]] += 1
            lines.append({"custom_id": line["custom_id"], "result": result})
        batch["request_counts"]["processing"] = 0
        batch["processing_status"] = "ended"
        batch["results_url"] = f"{self.url}/v1/messages/batches/{id}/results"


def _completion(prompt: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"echo {prompt}"}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    answer = {"id": "c", "object": "chat.completion", "created": NOW, "model": "m", "usage": usage}
    answer["choices"] = [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
    ChatCompletion.model_validate(answer)
    return answer


def _message(prompt: str) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": f"echo {prompt}"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 8, "cache_read_input_tokens": 2, "output_tokens": 5},
    }
