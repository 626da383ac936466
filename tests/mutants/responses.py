"""The Responses API, broken in one place at a time: translation, events, stored and background responses."""

from mutants.mutant import Mutant, MutantGroup

_DECODE = ("tests/ingress/responses/test_responses_decode.py",)
_WRITER = ("tests/ingress/responses/test_response_writer.py",)
_STORED = ("tests/e2e/test_stored_responses.py",)
_BACKGROUND = ("tests/durable/test_background.py", "tests/durable/test_background_claims.py")

GROUP = MutantGroup(
    tests=(*_DECODE, *_WRITER, *_BACKGROUND, *_STORED),
    mutants=(
        Mutant(
            "a namespace is lost on the way to the model",
            "ingress/responses/conversation.py",
            "return chat_name(item.name, item.namespace)",
            "return item.name",
            _DECODE,
        ),
        Mutant(
            "a namespace is lost on the way back",
            "ingress/responses/output_items.py",
            "if tool.namespace is not None:",
            "if False:",
            _WRITER,
        ),
        Mutant(
            "tools that are left out are not named",
            "ingress/responses/tools.py",
            "                self.left_out.append(tool.type)\n",
            "",
            _DECODE,
        ),
        Mutant(
            "a type of tools may have any end",
            "ingress/responses/tools.py",
            "_LEFT_OUT.fullmatch(tool.type)",
            "_LEFT_OUT.match(tool.type)",
            ("tests/ingress/responses/test_responses_openapi.py",),
        ),
        Mutant(
            "all tools are allowed",
            "ingress/responses/tools.py",
            "if allowed is None or name in allowed]",
            "]",
            _DECODE,
        ),
        Mutant(
            "reasoning of other providers is taken for text",
            "ingress/responses/conversation.py",
            "sealed is not None and sealed.startswith(_SEALED)",
            "sealed is not None",
            _DECODE,
        ),
        Mutant(
            "pieces that are forwarded undecoded are missing in the item",
            "ingress/responses/writer.py",
            "        item.pieces.append(text)\n        number",
            "        number",
            _WRITER,
        ),
        Mutant(
            "events are not numbered",
            "ingress/responses/writer.py",
            "        self._sequence = number + 1\n        rest",
            "        rest",
            _WRITER,
        ),
        Mutant(
            "a response that was cut off looks complete",
            "ingress/responses/writer.py",
            'self._close(events, "incomplete")',
            'self._close(events, "completed")',
            _WRITER,
        ),
        Mutant(
            "heartbeats are written before the response is created",
            "ingress/responses/writer.py",
            "        events = self._start()\n        if not events:\n",
            "        events: list[bytes] = []\n        if not events:\n",
            _WRITER,
        ),
        Mutant(
            "a response is stored although the client does not want it",
            "ingress/responses/endpoint.py",
            "if self.responses is None or request.store is False:",
            "if self.responses is None:",
            _STORED,
        ),
        Mutant(
            "an answer may follow on a response that has not ended",
            "ingress/responses/stored_items.py",
            "if state.status in UNFINISHED:",
            "if False:",
            ("tests/ingress/responses/test_stored_items.py",),
        ),
        Mutant(
            "the length of a conversation has no bound",
            "durable/responses.py",
            "len(found) == MAX_CHAIN or ",
            "",
            _BACKGROUND,
        ),
        Mutant(
            "a response is stored before the ledger has its rows",
            "durable/background.py",
            "        await self._write_ledger()\n",
            "",
            _BACKGROUND,
        ),
        Mutant(
            "a streamed response runs again after a restart",
            "durable/background.py",
            "        elif call.is_streamed:\n",
            "        elif False:\n",
            _BACKGROUND,
        ),
        Mutant(
            "a repeated call has another job id",
            "durable/background.py",
            "stored_call, call.tries, record_try",
            "stored_call, 0, record_try",
            _BACKGROUND,
        ),
        Mutant(
            "the call of an ended response is left",
            "durable/background.py",
            "        await self._documents.delete(tenant, KIND, id)  # last",
            "        # last",
            _BACKGROUND,
        ),
        Mutant(
            "the last end of a response counts",
            "durable/responses.py",
            "if stored.state.status not in UNFINISHED:",
            "if False:",
            _BACKGROUND,
        ),
        Mutant(
            "a response that another gateway runs is continued",
            "durable/background.py",
            "unfinished - await self._claims.read() - self._held",
            "unfinished - self._held",
            _BACKGROUND,
        ),
        Mutant(
            "a response is continued before its gateway could claim it",
            "durable/background.py",
            "unclaimed & self._unclaimed, unclaimed",
            "unclaimed, unclaimed",
            _BACKGROUND,
        ),
        Mutant(
            "tenants have any number of unfinished responses",
            "durable/background.py",
            ">= MAX_UNFINISHED:",
            ">= 2 * MAX_UNFINISHED:",
            _BACKGROUND,
        ),
    ),
)
