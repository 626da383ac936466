"""Clients with the official `openai` client and its default of two retries.

Each call is made at its scheduled time, whether or not earlier ones have been answered. The output has one line per
call: lane, due time, first token, end, error if there was one, attempts.

    python -m benchmarks.overload_clients URL < SCHEDULE > FOUND

The schedule has its start in Unix time; a first line of output asks for it. With `hide_retry_after` as the last
argument the client does not see the Retry-After of a refusal.
"""

import asyncio
import json
import sys
import time
from typing import Any

import openai
import uvloop
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

HIDDEN_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")


async def main(url: str, hides_retry_after: bool) -> None:
    print("ready", flush=True)
    schedule = json.load(sys.stdin)
    refusals: dict[str, int] = {}

    async def count_refusals(response: Any) -> None:
        """Counts refusals by reason, which the client does not report."""
        if response.status_code >= 400:
            code = response.headers.get("x-inferry-drop-reason", str(response.status_code))
            refusals[code] = refusals.get(code, 0) + 1
            for name in HIDDEN_HEADERS if hides_retry_after else ():
                response.headers.pop(name, None)

    http = DefaultAsyncHttpxClient(event_hooks={"response": [count_refusals]})
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", http_client=http) as api:
        loop = asyncio.get_running_loop()
        begin = loop.time() + schedule["begin_at"] - time.time()
        calls = [asyncio.create_task(_call(api, one, begin)) for one in schedule["calls"]]
        result = await asyncio.gather(*calls)
    json.dump({"calls": result, "refusals": refusals}, sys.stdout)


async def _call(api: AsyncOpenAI, one: dict[str, Any], begin: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, begin + one["at"] - loop.time()))
    result: dict[str, Any] = {"lane": one["lane"], "at": one["at"], "late": loop.time() - begin - one["at"]}
    headers = {"x-inferry-lane": one["lane"], "x-inferry-deadline-ms": str(one["deadline_ms"])}
    messages: Any = [{"role": "user", "content": f"ticket {one['number']}: which team handles it?"}]
    try:
        raw = await api.chat.completions.with_raw_response.create(
            model="m",
            messages=messages,
            max_tokens=8,
            stream=True,
            extra_headers=headers,
        )
        result["attempts"] = 1 + raw.retries_taken
        result["queue_ms"] = float(raw.headers.get("x-inferry-queue-ms", "nan"))
        stream: Any = raw.parse()
        async for _ in stream:
            if "first" not in result:
                result["first"] = loop.time() - begin
    except openai.APIStatusError as error:
        result["error"] = str(error.code or error.status_code)
    except openai.APIError as error:
        result["error"] = type(error).__name__
    result["end"] = loop.time() - begin
    return result


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], sys.argv[2:] == ["hide_retry_after"]))
