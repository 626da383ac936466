"""64 sub-agents of one run over three gateway processes, one of which is killed: the run's ceiling holds."""

import http.client
import json
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from inferry.ledger.stores.opening import open_queries
from support.redis_server import RedisServer
from support.sharing_gateways import PROMPT_TOKENS, GatewayChild, an_engine
from support.waiting import until

AGENTS = 64
CEILING = 30_000
RUN = {"content-type": "application/json", "x-inferry-parent-run-id": "root", "x-inferry-tenant": "acme"}


class Agents:
    """Sub-agents that call gateways at random until the ceiling of their run is reached, and count what they get."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._lock = threading.Lock()
        self.delivered = 0
        self.codes: list[str] = []
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(AGENTS)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _work(self, number: int) -> None:
        rng, failures = random.Random(number), 0
        while failures < 40:
            code = self._call(rng.choice(self._ports), f"agent-{number}", rng.randint(20, 200))
            if code == "run_budget_exhausted":
                return
            if code is not None:
                failures += 1

    def _call(self, port: int, run: str, tokens: int) -> str | None:
        """One stream, to its end or to that of its gateway; the code of an error."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "messages": messages, "max_tokens": tokens, "stream": True}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {**RUN, "x-inferry-run-id": run})
            answer = connection.getresponse()
            if answer.status != 200:
                code = str(json.loads(answer.read())["error"]["code"])
                with self._lock:
                    self.codes.append(code)
                return code
            is_first = True
            for line in answer:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices")
                    text = choices[0]["delta"].get("content") if choices else None
                    if text:
                        with self._lock:
                            self.delivered += len(text) + PROMPT_TOKENS * is_first
                        is_first = False
        except (OSError, http.client.HTTPException, ValueError):
            return "lost"
        finally:
            connection.close()
        return None


def test_sub_agents_over_three_gateways_keep_the_ceiling_of_their_run_when_one_is_killed(
    tmp_path: Path, redis_server: RedisServer, postgres_url: str
) -> None:
    with an_engine() as url, ExitStack() as stack:
        config = {
            "ledger": postgres_url,
            "cluster": {"redis": redis_server.url},
            "workers": [{"kind": "vllm", "name": "engine", "url": url, "models": ["m"]}],
            "tenants": {"acme": {"run_token_ceiling": CEILING}},
        }
        children = [GatewayChild(tmp_path / str(number), config) for number in range(3)]
        for child in children:
            stack.callback(child.kill)
            until(child.is_ready, problem=child.log.read_text)
        agents = Agents([child.port for child in children])
        until(lambda: agents.delivered > CEILING / 3)
        children[1].stop(signal.SIGKILL)
        agents.join()
        assert "run_budget_exhausted" in agents.codes
        for child in (children[0], children[2]):
            child.stop(signal.SIGTERM)
    with open_queries(postgres_url) as queries:
        recorded = sum(row.prompt_tokens + row.output_tokens for row in queries.jobs(limit=100_000))
    with redis_server.client() as client:
        (key,) = client.keys("inferry:1:0:run*tokens")
        stored: Any = client.hgetall(key)
    settled = int(stored[b"s"])
    held = sum(int(amount) for name, amount in stored.items() if name.startswith(b"h"))
    print(f"{agents.delivered} delivered, {recorded} recorded, {settled} settled, {held} held by the killed gateway")
    assert agents.delivered <= CEILING
    assert recorded <= settled + held
    assert settled + held <= CEILING
    assert agents.delivered <= settled + held
    assert agents.delivered >= CEILING * 0.7
