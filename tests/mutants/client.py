"""The Python client, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

GROUP = MutantGroup(
    tests=("tests/client/test_client_answers.py", "tests/client/test_client_http.py", "tests/client/test_client.py"),
    mutants=(
        Mutant(
            "calls are retried against the gateway's advice",
            "client/errors.py",
            "error.should_retry is not True or ",
            "error.should_retry is False or ",
        ),
        Mutant(
            "seconds are preferred to milliseconds",
            "client/errors.py",
            '(("retry-after-ms", 0.001), ("retry-after", 1.0))',
            '(("retry-after", 1.0), ("retry-after-ms", 0.001))',
        ),
        Mutant(
            "the limit of retries is off by one",
            "client/connection.py",
            "wait_s is None or retried == retries",
            "wait_s is None or (retries is not None and retried > retries)",
        ),
        Mutant(
            "a connection is never used again",
            "client/http.py",
            "self._can_keep_alive = self._parser.should_keep_alive()",
            "self._can_keep_alive = False",
        ),
        Mutant(
            "a connection is used again although the server closes it",
            "client/http.py",
            "self._can_keep_alive = self._parser.should_keep_alive()",
            "self._can_keep_alive = True",
        ),
        Mutant(
            "an interim response is the answer",
            "client/http.py",
            "self._has_head = self.status >= 200",
            "self._has_head = True",
        ),
        Mutant(
            "a stream that is left stays open",
            "client/calls.py",
            "        if self._response is not None:\n            self._response.close()\n",
            "",
        ),
        Mutant(
            "a cut stream looks complete",
            "client/calls.py",
            "            if not self._builder.is_complete:\n                raise ConnectionFailed",
            "            if False:\n                raise ConnectionFailed",
        ),
        Mutant(
            "an error in a stream is skipped",
            "client/completions.py",
            'if not isinstance(event, dict) or "error" in event:',
            "if not isinstance(event, dict):",
        ),
        Mutant(
            "a batch runs in the lane of live calls",
            "client/calls.py",
            'self._calls(prompts, step, "P2", None,',
            "self._calls(prompts, step, None, None,",
        ),
        Mutant(
            "a failed item ends the others",
            "client/calls.py",
            "            except CallError as error:\n                results[number] = error\n",
            "            except ValueError:\n                raise\n",
        ),
        Mutant(
            "an exception does not cancel the run",
            "client/async_client.py",
            "            elif kind is not None:\n",
            "            elif kind is not None and self.is_cancelled:\n",
        ),
        Mutant(
            "a cancelled run is finished",
            "client/async_client.py",
            "if kind is None and not self.is_cancelled:",
            "if kind is None:",
        ),
        Mutant(
            "a run names more tools than the gateway takes",
            "client/tools.py",
            "in named[:MAX_REPORTED]",
            "in named",
        ),
        Mutant(
            "cached prompts do not count against the budget",
            "client/async_client.py",
            'used["tokens"]["prompt"] + used["tokens"]["output"]',
            'used["tokens"]["output"]',
        ),
        Mutant(
            "an interrupted thread leaves its call running",
            "client/sync_client.py",
            "            if not result.done():\n",
            "            if result.done():\n",
        ),
    ),
)
