"""Streams, broken in one place at a time: what a reader gets, and what another attempt makes of it."""

from mutants.mutant import Mutant, MutantGroup

_MAILBOX = ("tests/streams/test_stream_attempts.py", "tests/streams/test_mailbox.py", "tests/streams/test_demux.py")
_SHARED = ("tests/streams/test_stream_attempts.py", "tests/streams/test_fan_out.py")
_TEXT = (
    "tests/streams/test_stop_strings.py",
    "tests/engine/test_byte_fallback.py",
    "tests/streams/test_detokenizer.py",
)

GROUP = MutantGroup(
    tests=(*_MAILBOX, *_SHARED, *_TEXT),
    mutants=(
        Mutant(
            "a third attempt counts from where the second began",
            "streams/mailbox.py",
            "self._index_offset += self._next_index - len(self._preamble or ())",
            "self._index_offset = self._next_index - len(self._preamble or ())",
            _MAILBOX,
        ),
        Mutant(
            "held back output counts as delivered",
            "streams/mailbox.py",
            "self._index_offset += self._next_index - len(self._preamble or ())",
            "self._index_offset += self._next_index",
            _MAILBOX,
        ),
        Mutant(
            "a restart after the first tokens goes unnoticed",
            "streams/mailbox.py",
            "self.restarts += self._index_offset > 0 or self._preamble is None",
            "self.restarts += self._index_offset > 0",
            _MAILBOX,
        ),
        Mutant(
            "output of a restarted attempt counts as unread",
            "streams/mailbox.py",
            "            self.unread_bytes = 0\n            self._index_offset = 0\n",
            "            self._index_offset = 0\n",
            _MAILBOX,
        ),
        Mutant(
            "an attempt that goes on keeps its first words back",
            "streams/mailbox.py",
            "self._preamble = None if self._index_offset else []",
            "self._preamble = []",
            _MAILBOX,
        ),
        Mutant(
            "a role is delivered before an error",
            "streams/mailbox.py",
            "if self._preamble and isinstance(end, Done):",
            "if self._preamble:",
            _MAILBOX,
        ),
        Mutant(
            "unread text is not counted",
            "streams/mailbox.py",
            "self.unread_bytes += len(delta.raw) + len(delta.text)",
            "self.unread_bytes += len(delta.raw)",
            _MAILBOX,
        ),
        Mutant(
            "taken deltas count as unread",
            "streams/mailbox.py",
            "        self._merged_count = 0\n        self.unread_bytes = 0\n        if len(deltas) == 1:",
            "        self._merged_count = 0\n        if len(deltas) == 1:",
            _MAILBOX,
        ),
        Mutant(
            "a delta of another step is delivered",
            "streams/mailbox.py",
            "if delta.run_id != job.run_id or delta.step_id != job.step_id:",
            "if delta.run_id != job.run_id:",
            _MAILBOX,
        ),
        Mutant(
            "a second stream of a job takes the place of the first",
            "streams/demux.py",
            "        if job_id in self._streams:\n",
            "        if False:\n",
            _MAILBOX,
        ),
        Mutant(
            "one restart makes a restart of every later attempt",
            "streams/fan_out.py",
            "        self._restarts = source.restarts\n        self.has_started = False\n",
            "        self.has_started = False\n",
            _SHARED,
        ),
        Mutant(
            "a restarted attempt counts as started",
            "streams/fan_out.py",
            "        self._restarts = source.restarts\n        self.has_started = False\n",
            "        self._restarts = source.restarts\n",
            _SHARED,
        ),
        Mutant(
            "output of a restarted attempt uses history budget",
            "streams/fan_out.py",
            "            self._history.clear()\n            self._bytes = 0\n",
            "            self._history.clear()\n",
            _SHARED,
        ),
        Mutant(
            "the last page of one answer is too much",
            "streams/fan_out.py",
            "self._reserved > history_budget.limit_per_execution",
            "self._reserved >= history_budget.limit_per_execution",
            _SHARED,
        ),
        Mutant(
            "the last page of all answers is too much",
            "streams/fan_out.py",
            "history_budget.used > history_budget.limit",
            "history_budget.used >= history_budget.limit",
            _SHARED,
        ),
        Mutant(
            "a late reader gets output of a restarted attempt",
            "streams/fan_out.py",
            "        if self._attempt is not self.source.attempt:\n"
            "            self._switch_attempt()\n"
            "        if self._history",
            "        if self._history",
            _SHARED,
        ),
        Mutant(
            "unread output of a follower is not counted",
            "streams/fan_out.py",
            "        self.unread_bytes += size\n",
            "",
            _SHARED,
        ),
        Mutant(
            "a character has no more than three bytes",
            "streams/detokenizer.py",
            "_MAX_UNCERTAIN_CHARS = 3",
            "_MAX_UNCERTAIN_CHARS = 2",
            _TEXT,
        ),
        Mutant(
            "bytes that are no character are held back to the end",
            "streams/detokenizer.py",
            "certain -= min(open_end, _MAX_UNCERTAIN_CHARS)",
            "certain -= open_end",
            _TEXT,
        ),
        Mutant(
            "a character that was given out is given out again as bytes",
            "streams/detokenizer.py",
            "        if not text.startswith(self._emitted):\n",
            "        if False:\n",
            _TEXT,
        ),
        Mutant(
            "emitted tokens are decoded again",
            "streams/detokenizer.py",
            "            del window[: self._settled_tokens]\n",
            "",
            _TEXT,
        ),
        Mutant(
            "bytes that come together are no characters",
            "streams/detokenizer.py",
            "if text.endswith(_UNFINISHED) and len(token_ids) > 1:",
            "if False:",
            _TEXT,
        ),
        Mutant(
            "a text begins again where the window does",
            "streams/detokenizer.py",
            "_CONTEXT_TOKENS = 4",
            "_CONTEXT_TOKENS = 0",
            _TEXT,
        ),
        Mutant(
            "the stop string that begins first counts",
            "streams/stop_strings.py",
            "found = [(at + len(stop), at)",
            "found = [(at, at)",
            _TEXT,
        ),
        Mutant(
            "a stop string that lacks one letter slips out",
            "streams/stop_strings.py",
            "min(len(text), len(stop) - 1)",
            "min(len(text), len(stop) - 2)",
            _TEXT,
        ),
    ),
)
