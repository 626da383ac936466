"""Clients that call a gateway without a pause. Every failure is kept."""

import http.client
import json
import threading
from typing import Any

from support.several_processes import Answered, a_body, expected_text
from support.waiting import until

TOKENS = 30
RETRY_S = 0.2


class NoAnswer(Exception):
    """The call is to be made again."""


class SteadyClients:
    """A context manager. Half of the clients keep their connection, the others make one for each call.

    `ports` are those of the gateways that a load balancer would choose from; it may change, and be empty for a time.
    Every client alternates between streamed and whole answers, and compares them with those of an undisturbed engine.
    With `retries` a call that has no answer, or 503, is made again, as SDKs do; an answer that breaks off is a failure
    all the same.
    """

    def __init__(
        self, ports: list[int], clients: int = 8, headers: dict[str, str] | None = None, *, retries: bool = False
    ) -> None:
        self.failures: list[str] = []
        self.processes: set[str] = set()
        self.reused = 0
        self._ports = ports
        self._headers = headers or {}
        self._retries = retries
        self._counts = [0] * clients
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call_on, args=(number,)) for number in range(clients)]

    def __enter__(self) -> "SteadyClients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)

    def wait_for(self, more: int = 5) -> None:
        """Until every client has had this many further answers."""
        before = list(self._counts)
        until(
            lambda: self.failures or all(now >= then + more for now, then in zip(self._counts, before, strict=True)),
            problem=lambda: self._counts,
        )

    def _call_on(self, number: int) -> None:
        keeps = number % 2 == 0
        connection: http.client.HTTPConnection | None = None
        call = 0
        while not self._stop.is_set():
            if connection is None:
                if not (ports := tuple(self._ports)):
                    self._stop.wait(RETRY_S)
                    continue
                port = ports[(number + call) % len(ports)]
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            body = a_body(number * 100 + call % 100, TOKENS, stream=call % 2 == 0)
            try:
                self._check(connection, body)
            except NoAnswer:
                connection.close()
                connection = None
                self._stop.wait(RETRY_S)
                continue
            except Exception as error:
                self.failures.append(f"client {number}, call {call}: {error!r}")
                break
            self._counts[number] += 1
            call += 1
            if not keeps or connection.sock is None:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _check(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> None:
        self.reused += connection.sock is not None
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer if self._retries else error from None
        answered = Answered()
        answered.body = response.read()
        answered.headers = {name.lower(): value for name, value in response.getheaders()}
        if response.status == 503 and self._retries:
            raise NoAnswer
        assert response.status == 200, (response.status, answered.body)
        if body["stream"]:
            assert answered.body.endswith(b"data: [DONE]\n\n"), answered.body[-300:]
            text = answered.text
        else:
            text = answered.json["choices"][0]["text"]
        assert text == expected_text(body), (text, expected_text(body))
        self.processes.add(answered.process)
