"""Ensembles: several models answer one call at the same time, and one answer is used."""

import asyncio
import logging
from typing import Any

from inferry.domain.errors import GatewayError, InternalError, UnsupportedFeature
from inferry.pipelines import votes
from inferry.pipelines.answers import logprobs_of, meaning, without_logprobs
from inferry.pipelines.composed import ComposedCall, StepAnswer, asks_for, check_generates, step_fields, with_logprobs
from inferry.pipelines.settings import EnsembleConfig
from inferry.pipelines.verifiers import Verifier

log = logging.getLogger(__name__)


class Ensemble:
    """One ensemble. A vote that is decided cancels the members that have not answered."""

    kind = "ensemble"

    def __init__(self, settings: EnsembleConfig) -> None:
        self._settings = settings
        self._verifier = None if settings.verifier is None else Verifier(settings.verifier)

    @property
    def typical_model(self) -> str:
        return self._settings.models[0]

    async def serve(self, call: ComposedCall) -> None:
        check_generates(call, self.kind)
        if bytes(call.fields.get("n", b"1")) not in (b"1", b"null"):
            raise UnsupportedFeature(f"the ensemble `{call.name}` answers one request with one choice", param="n")
        tasks = {
            asyncio.get_running_loop().create_task(self._ask(call, member)): member
            for member in range(len(self._settings.models))
        }
        try:
            answers = await self._collect(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        member, score, reason = await self._choose(call, {one: answers[one].decode() for one in sorted(answers)})
        body = answers[member].decode()
        model = self._settings.models[member]
        path = ["+".join(self._settings.models), model]
        call.record(self.kind, path, accepted=True, reason=reason, score=score)
        call.answer(answers[member], body if asks_for(call.fields, "logprobs") else without_logprobs(body), path)

    async def _ask(self, call: ComposedCall, member: int) -> StepAnswer:
        fields = step_fields(call.fields, self._settings.models[member])
        if self._settings.choose == "logprob":
            fields = with_logprobs(fields, call.fields, call.step_path)
        if "seed" in fields and self._settings.models.count(fields["model"]) > 1:
            del fields["seed"]  # with one seed, answers of one model would be equal
        return await call.step(f"member-{member + 1}", call.step_path, fields)

    async def _collect(self, tasks: dict["asyncio.Task[StepAnswer]", int]) -> dict[int, StepAnswer]:
        """Answers by member, once all have ended or the vote is decided. Raises where too few have answered."""
        answers: dict[int, StepAnswer] = {}
        cast: dict[int, object] = {}
        open_tasks = set(tasks)
        error: GatewayError | None = None
        while open_tasks:
            done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    answers[tasks[task]] = answer = task.result()
                except GatewayError as failed:
                    error = failed
                else:
                    cast[tasks[task]] = meaning(answer.decode()["choices"][0])
            has_enough = len(answers) >= self._settings.min_answers
            if self._settings.choose == "vote" and has_enough and votes.is_decided(cast, len(open_tasks)):
                return answers
        if len(answers) < self._settings.min_answers:
            raise error or InternalError("too few members of the ensemble answered")
        return answers

    async def _choose(self, call: ComposedCall, bodies: dict[int, dict[str, Any]]) -> tuple[int, float | None, str]:
        match self._settings.choose:
            case "vote":
                cast = {member: meaning(body["choices"][0]) for member, body in bodies.items()}
                member = votes.leader(cast)
                return member, votes.share(cast, member), "vote"
            case "logprob":
                found = [(member, logprobs_of(body)) for member, body in bodies.items()]
                scores = [(member, sum(values) / len(values)) for member, values in found if values]
                if not scores:
                    log.warning("no member of ensemble %s gave log probabilities: the first answer is used", call.name)
                    return next(iter(bodies)), None, "no_logprobs"
            case _:
                assert self._verifier is not None, "the configuration was checked"
                verified = [
                    self._verifier.score(call, f"verifier-{member + 1}", body) for member, body in bodies.items()
                ]
                scores = list(zip(bodies, await asyncio.gather(*verified), strict=True))
        member = votes.best(scores)
        return member, dict(scores)[member], self._settings.choose
