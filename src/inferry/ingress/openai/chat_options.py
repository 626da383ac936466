"""Options of chat completions in the requests of other APIs: passed on under their own names, or refused by name.

An option is never dropped. The answers of these APIs have no place for what some options ask for, and others have
another name there; both are refused. All others reach the engine, and a model that lacks one refuses it as in chat.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final

import msgspec
from msgspec import UNSET

from inferry.domain.errors import UnsupportedFeature
from inferry.ingress.openai.decode import RESERVED_FIELDS
from inferry.ingress.openai.features import FEATURE_FIELDS, features_of
from inferry.ingress.openai.request_schema import ChatCompletionRequest, ChatOptions

_TRANSLATED: Final = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "service_tier", "user", "prompt_cache_key"}
)
"""Fields that say nothing about the output, or that the APIs translate themselves."""
_UNANSWERED: Final = frozenset(
    {"n", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "functions", "modalities", "audio"}
    | {"continue_final_message"}
)
"""Options for answers of another shape."""
_encode = msgspec.json.encode


class PassedOptions:
    """The rule of one API. `renamed`: options that it has under another name. `translated`: options that it translates
    itself.
    """

    def __init__(self, renamed: Mapping[str, str], translated: Sequence[str] = ()) -> None:
        names = [name for name in ChatOptions.__struct_fields__ if name not in RESERVED_FIELDS]
        refused = _UNANSWERED.union(renamed).difference(translated)
        self.refused: Final = tuple([name for name in names if name in refused])
        self._renamed = renamed
        self._passed = tuple([name for name in names if name not in refused | _TRANSLATED | frozenset(translated)])
        self._values_refused = attrgetter(*self.refused)
        self._values_passed = attrgetter(*self._passed)
        # Most calls have none of the refused options: one comparison shows it.
        self._none_refused = self._values_refused(ChatCompletionRequest(model="", messages=[]))

    def check(self, request: ChatOptions) -> None:
        """Raises UnsupportedFeature for an option that this API does not have. Values without effect are accepted."""
        values = self._values_refused(request)
        if values == self._none_refused:
            return
        given = {name: value for name, value in zip(self.refused, values, strict=True) if _is_given(value)}
        asked = ChatCompletionRequest(model=request.model, messages=[])
        for name, value in given.items():
            setattr(asked, name, value)
        used = {param for _, param in features_of(asked)}
        for name, value in given.items():
            if name in used or (name not in FEATURE_FIELDS and value != []):
                own = self._renamed.get(name)
                more = "" if own is None else f": use `{own}`"
                error = UnsupportedFeature(f"`{name}` is not supported by this API{more}", param=name)
                error.has_client_names = True
                raise error

    def pass_on(self, request: ChatOptions, wire: ChatCompletionRequest) -> bytes:
        """Copy the options to `wire`; return them as fields of a body, each after a comma."""
        fields: list[bytes] = []
        for name, value in zip(self._passed, self._values_passed(request), strict=True):
            if _is_given(value):
                setattr(wire, name, value)
                fields += (b',"%b":' % name.encode(), _encode(value))
        return b"".join(fields)


def _is_given(value: object) -> bool:
    return value is not None and value is not UNSET
