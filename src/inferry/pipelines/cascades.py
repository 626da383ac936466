"""Cascades: a small model answers, and a large one where the small one is unsure.

The small model's answer is whole before it is tested, so a streaming client gets it in one piece. The large model's
answer is streamed through. A sample of calls is answered by both, and the answers are compared. For an accepted answer,
and for a stream, that happens in a task of its own, for which the large model is asked again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec import Raw

from inferry.domain.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    GatewayError,
    QueueFull,
    UnsupportedFeature,
)
from inferry.pipelines.answers import agree, logprobs_of, schema_problem, without_logprobs
from inferry.pipelines.composed import ComposedCall, StepAnswer, asks_for, check_generates, step_fields, with_logprobs
from inferry.pipelines.settings import AcceptConfig, CascadeConfig
from inferry.pipelines.verifiers import Verifier

log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Whether the small model's answer is used. `score` is its mean log probability, where that is known."""

    accepted: bool
    reason: str
    score: float | None = None


def judge(accept: AcceptConfig, fields: Mapping[str, Raw], body: Mapping[str, Any]) -> Verdict:
    """The verdict before a verifier is asked. Pure."""
    values = logprobs_of(body)
    score = None if values is None else sum(values) / len(values)
    if accept.schema and schema_problem(fields, body) is not None:
        return Verdict(False, "schema", score)
    if accept.needs_logprobs and (values is None or score is None):
        return Verdict(False, "no_logprobs")
    if accept.min_mean_logprob is not None and score is not None and score < accept.min_mean_logprob:
        return Verdict(False, "mean_logprob", score)
    if accept.min_token_logprob is not None and values is not None and min(values) < accept.min_token_logprob:
        return Verdict(False, "token_logprob", score)
    return Verdict(True, "accepted", score)


class Cascade:
    """One cascade. `draw` returns a random number from 0 to 1, for the sample of compared calls."""

    kind = "cascade"

    def __init__(self, settings: CascadeConfig, draw: Callable[[], float]) -> None:
        self._settings = settings
        self._draw = draw
        self._verifier = None if settings.accept.verifier is None else Verifier(settings.accept.verifier)
        self._shadows: set[asyncio.Task[None]] = set()
        self._has_warned = False

    @property
    def typical_model(self) -> str:
        return self._settings.large

    async def serve(self, call: ComposedCall) -> None:
        check_generates(call, self.kind)
        settings = self._settings
        is_sampled = self._draw() < settings.shadow
        try:
            small = await self._ask_small(call)
        except GatewayError as error:
            if not may_escalate(error):
                raise
            self._warn(call, error)
            self._escalate(call, Verdict(False, f"error_{error.code}"))
            return
        body = small.decode()
        verdict = judge(settings.accept, call.fields, body)
        if verdict.reason == "no_logprobs":
            self._warn(call, None)
        if verdict.accepted and self._verifier is not None:
            accepted = await self._verifier.score(call, "verifier", body) >= 0.5
            verdict = verdict if accepted else Verdict(False, "verifier", verdict.score)
        if not verdict.accepted:
            if not is_sampled:
                self._escalate(call, verdict)
            elif call.streams:
                call.forward("large", settings.large, self._path(verdict))
                self._compare_later(call, verdict, body, "compared")
            else:
                await self._escalate_compared(call, verdict, body)
            return
        shown = body if asks_for(call.fields, "logprobs") else without_logprobs(body)
        call.answer(small, shown, [settings.small])
        if is_sampled:
            self._compare_later(call, verdict, body, "shadow")
        else:
            self._record(call, verdict)

    async def _ask_small(self, call: ComposedCall) -> StepAnswer:
        fields = step_fields(call.fields, self._settings.small)
        if self._settings.accept.needs_logprobs:
            fields = with_logprobs(fields, call.fields, call.step_path)
        return await call.step("small", call.step_path, fields)

    def _escalate(self, call: ComposedCall, verdict: Verdict) -> None:
        path = self._path(verdict)
        self._record(call, verdict)
        call.forward("large", self._settings.large, path)

    async def _escalate_compared(self, call: ComposedCall, verdict: Verdict, small: Mapping[str, Any]) -> None:
        large = await call.step("large", call.step_path, step_fields(call.fields, self._settings.large))
        body = large.decode()
        call.answer(large, body, self._path(verdict))
        self._record(call, verdict, agree(small, body))

    def _compare_later(self, call: ComposedCall, verdict: Verdict, small: Mapping[str, Any], stage: str) -> None:
        task = asyncio.get_running_loop().create_task(self._compare(call, verdict, small, stage))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _compare(self, call: ComposedCall, verdict: Verdict, small: Mapping[str, Any], stage: str) -> None:
        agreed: bool | None = None
        try:
            fields = step_fields(call.fields, self._settings.large)
            answer = await call.step(stage, call.step_path, fields, lane="P2", is_shadow=True)
            agreed = agree(small, answer.decode())
        except GatewayError as error:
            log.info("a compared call of cascade %s got no answer (%s)", call.name, error.code)
        except Exception:
            log.exception("comparing answers of cascade %s failed", call.name)
        self._record(call, verdict, agreed)

    def _path(self, verdict: Verdict) -> list[str]:
        settings = self._settings
        return [settings.small] if verdict.accepted else [settings.small, settings.large]

    def _record(self, call: ComposedCall, verdict: Verdict, agreed: bool | None = None) -> None:
        accepted, reason, score = verdict
        call.record(self.kind, self._path(verdict), accepted=accepted, reason=reason, score=score, agreed=agreed)

    def _warn(self, call: ComposedCall, error: GatewayError | None) -> None:
        """Say once that no answer of the small model can be accepted."""
        lacks = error is None or (isinstance(error, UnsupportedFeature) and error.param in ("logprobs", None))
        if lacks and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the model %s of cascade %s gives no log probabilities: its answers count as unsure",
                self._settings.small,
                call.name,
            )


def may_escalate(error: GatewayError) -> bool:
    """Whether the large model may succeed where the small one failed: what fails for the caller fails for both."""
    if isinstance(error, DeadlineExceeded | Draining):
        return False
    return error.status >= 500 or isinstance(error, ContextLengthExceeded | QueueFull | UnsupportedFeature)
