"""The Messages API, broken in one place at a time: translation, items, events, errors."""

from mutants.mutant import Mutant, MutantGroup

_ITEMS = ("tests/ingress/test_chat_items.py",)
_DECODE = ("tests/ingress/anthropic/test_decode.py",)
_MESSAGES = ("tests/ingress/anthropic/test_messages.py",)

GROUP = MutantGroup(
    tests=(*_ITEMS, *_DECODE, *_MESSAGES),
    mutants=(
        Mutant(
            "an event with another field counts as plain text",
            "ingress/chat_items.py",
            """text.count(b'"') != text.count(b'\\\\"') or""",
            "",
            _ITEMS,
        ),
        Mutant(
            "arguments of an earlier tool call count as those of the last",
            "ingress/chat_items.py",
            "            self._plain_arguments = None\n",
            "",
            _ITEMS,
        ),
        Mutant(
            "tool calls without an index are one call",
            "ingress/chat_items.py",
            "at = self._calls if name else self._calls - 1",
            "at = 0",
            _ITEMS,
        ),
        Mutant(
            "text after a failover is lost",
            "ingress/chat_items.py",
            "            items.append(Text(delta.text))\n",
            "            pass\n",
            _ITEMS,
        ),
        Mutant(
            "the billing header stays in the prompt",
            "ingress/anthropic/conversation.py",
            "if not text.startswith(BILLING_HEADER):",
            "if True:",
            _DECODE,
        ),
        Mutant(
            "a system turn after an answer joins the turn before it",
            "ingress/chat_messages.py",
            """            self.begin_turn("user")
            self._user_parts.append(_text_part(b'"<system>""",
            """            self._user_parts.append(_text_part(b'"<system>""",
            _DECODE,
        ),
        Mutant(
            "results of tools follow the text of their turn",
            "ingress/chat_messages.py",
            """        self._messages += [message for _, message in self._tool_results]
        if self._user_parts:
            self._messages.append(ChatMessage("user", _content(self._user_parts)))
""",
            """        if self._user_parts:
            self._messages.append(ChatMessage("user", _content(self._user_parts)))
        self._messages += [message for _, message in self._tool_results]
""",
            _DECODE,
        ),
        Mutant(
            "results of tools keep the order in which they were sent",
            "ingress/chat_messages.py",
            "        self._tool_results.sort(key=_place)\n",
            "",
            _DECODE,
        ),
        Mutant(
            "a call of an earlier turn decides the place of a result",
            "ingress/chat_messages.py",
            """            if role == "assistant":
                self._call_places.clear()
""",
            "",
            _DECODE,
        ),
        Mutant(
            "a failed tool looks like a successful one",
            "ingress/anthropic/conversation.py",
            'b"Error: " if block.is_error else b""',
            'b""',
            _DECODE,
        ),
        Mutant(
            "an image is no feature of the request",
            "ingress/anthropic/conversation.py",
            '        self.images.append(f"{path}.image")\n',
            "",
            _DECODE,
        ),
        Mutant(
            "server tools are passed on as functions",
            "ingress/anthropic/decode.py",
            'if tool.type not in (None, "custom"):',
            "if False:",
            _DECODE,
        ),
        Mutant(
            "any tool means no tool in particular",
            "ingress/anthropic/decode.py",
            '{"any": "required"}.get(choice.type, choice.type)',
            "choice.type",
            _DECODE,
        ),
        Mutant(
            "cached tokens count twice",
            "ingress/anthropic/message.py",
            "max(0, prompt - cached)",
            "prompt",
            _MESSAGES,
        ),
        Mutant(
            "a forced tool call ends the turn",
            "ingress/anthropic/message.py",
            '"tool_use" if has_tool_calls else "end_turn"',
            '"end_turn"',
            _MESSAGES,
        ),
        Mutant(
            "a thinking block has no signature",
            "ingress/anthropic/writer.py",
            "            events.append(sign + signature(self._job).encode() + _END)\n",
            "",
            _MESSAGES,
        ),
        Mutant(
            "arguments are written to whichever call is open",
            "ingress/anthropic/writer.py",
            "if self._kind != _TOOL or item.index != self._call:",
            "if self._kind != _TOOL:",
            _MESSAGES,
        ),
        Mutant(
            "overload looks like a rate limit",
            "ingress/anthropic/format.py",
            " or isinstance(error, QueueFull)",
            "",
            _MESSAGES,
        ),
    ),
)
