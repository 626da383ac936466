"""Verifiers: a model's yes or no, or a Python function's, about an answer."""

import asyncio
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from inferry.domain.errors import GatewayError, RunCancelled
from inferry.pipelines.answers import text_of
from inferry.pipelines.composed import CHAT, ComposedCall
from inferry.pipelines.rules import last_user_content
from inferry.pipelines.settings import VerifierConfig
from inferry.pipelines.threads import in_thread

log = logging.getLogger(__name__)

REJECTED = 0.0


class Verifier:
    """Scores answers: 1 for accepted, 0 for rejected, or the number that a function returns.

    A verifier that fails, or takes too long, rejects. Nothing of the call is logged.
    """

    def __init__(self, settings: VerifierConfig) -> None:
        self._settings = settings
        self._function = None if settings.function is None else load_function(settings.function)

    async def score(self, call: ComposedCall, stage: str, body: Mapping[str, Any]) -> float:
        try:
            async with asyncio.timeout(self._settings.timeout_ms / 1000):
                return await self._score(call, stage, text_of(body["choices"][0]))
        except RunCancelled:
            raise
        except Exception as error:
            reason = error.code if isinstance(error, GatewayError) else type(error).__name__
            log.warning("the verifier of %s failed (%s): the answer counts as rejected", call.name, reason)
            return REJECTED

    async def _score(self, call: ComposedCall, stage: str, text: str) -> float:
        if self._function is not None:
            fields = {name: msgspec.json.decode(value) for name, value in call.fields.items()}
            if inspect.iscoroutinefunction(self._function):
                return float(await self._function(fields, text))
            return float(await in_thread(self._function, fields, text))
        asked = last_user_content(call.fields)
        request = asked if isinstance(asked, str) else msgspec.json.encode(asked).decode()
        fields = {
            "model": self._settings.model,
            "messages": [
                {"role": "system", "content": self._settings.prompt},
                {"role": "user", "content": f"Request:\n{request}\n\nAnswer:\n{text}"},
            ],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = (await call.step(stage, CHAT, fields)).decode()
        return float(text_of(answer["choices"][0]).strip().casefold().startswith("yes"))


def load_function(path: str) -> Callable[[dict[str, Any], str], Any]:
    """The function named `module:name`. Raises ValueError."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"{path} is not a function")
    function: Callable[[dict[str, Any], str], Any] = found
    return function
