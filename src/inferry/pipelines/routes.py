"""Routes: rules, or a small model's classification, choose the model of a call."""

import asyncio
import logging

from inferry.domain.errors import GatewayError, RunCancelled
from inferry.pipelines.answers import text_of
from inferry.pipelines.composed import CHAT, ComposedCall
from inferry.pipelines.rules import choose, last_user_content, read_facts
from inferry.pipelines.settings import ClassifierConfig, RouteConfig

log = logging.getLogger(__name__)


class Route:
    """One route. The classifier runs only for calls that no rule decides."""

    kind = "route"

    def __init__(self, settings: RouteConfig) -> None:
        self._settings = settings
        self._reads_system = any(rule.when.system_hashes is not None for rule in settings.rules)

    @property
    def typical_model(self) -> str:
        return self._settings.default

    async def serve(self, call: ComposedCall) -> None:
        settings = self._settings
        facts = read_facts(call.fields, call.headers, call.tenant, call.lane, with_system_hash=self._reads_system)
        model = choose(settings.rules, facts)
        reason = "rule"
        path: list[str] = []
        if model is None and settings.classify is not None:
            path.append(settings.classify.model)
            model, reason = await self._classify(call, settings.classify), "label"
        if model is None:
            model, reason = settings.default, "default"
        path.append(model)
        call.record(self.kind, path, accepted=True, reason=reason)
        call.forward("routed", model, path)

    async def _classify(self, call: ComposedCall, classify: ClassifierConfig) -> str | None:
        """The model of the label; None after the time limit, an error, or an unknown label."""
        content = last_user_content(call.fields)
        if content is None:
            return None
        labels = list(classify.labels)
        fields = {
            "model": classify.model,
            "messages": [
                {"role": "system", "content": classify.prompt.replace("{labels}", ", ".join(labels))},
                {"role": "user", "content": content},
            ],
            "max_tokens": classify.max_tokens,
            "temperature": 0,
        }
        if classify.constrained:
            fields["structured_outputs"] = {"choice": labels}
        try:
            async with asyncio.timeout(classify.timeout_ms / 1000):
                answer = (await call.step("classify", CHAT, fields)).decode()
        except RunCancelled:
            raise
        except (GatewayError, TimeoutError) as error:
            reason = error.code if isinstance(error, GatewayError) else "timeout"
            log.warning("the classifier of route %s did not answer (%s): the default model is used", call.name, reason)
            return None
        return match_label(text_of(answer["choices"][0]), classify.labels)


def match_label(text: str, labels: dict[str, str]) -> str | None:
    """The model of the longest label that the text begins with, apart from case and punctuation around it."""
    said = text.strip(" \t\r\n\"'`*.").casefold()
    found = [label for label in labels if said.startswith(label.casefold())]
    return labels[max(found, key=len)] if found else None
