"""When two calls are the same: equal bodies, apart from what does not change the tokens.

Bodies are compared as bytes and never encoded again. A field that is written differently is a different field.
"""

import hashlib

import msgspec
from msgspec import Raw

from inferry.domain.jobs import InferenceJob
from inferry.domain.values import replace

IGNORED_FIELDS = frozenset(
    {"stream", "user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
)
"""Fields that do not change the output: delivery, identity of the user, urgency."""

_fields_decoder = msgspec.json.Decoder(dict[str, Raw])

RequestFields = dict[str, Raw]


def is_deterministic(job: InferenceJob) -> bool:
    """Whether the same call has the same answer: it is greedy, or has a seed.

    A seed counts even if the worker ignores it: a client that repeats a seed asks for the same answer.
    """
    sampling = job.payload.sampling
    return sampling.temperature == 0.0 or sampling.seed is not None


class RequestKey:
    """What a job asks, for others to be compared with. Its body is looked into once, and only if that is needed."""

    __slots__ = ("_fields", "_job")

    def __init__(self, job: InferenceJob) -> None:
        self._job = job
        self._fields: RequestFields | None = None

    def matches(self, other: InferenceJob) -> bool:
        """Whether one answer is an answer to both. What is cheap to compare goes first."""
        job = self._job
        if (
            job.prompt_hash != other.prompt_hash
            or job.tenant != other.tenant
            or job.payload.api != other.payload.api
            or job.payload.non_streaming != other.payload.non_streaming  # an answer in one piece cannot be streamed
            # Whether a call is predicted to be short or long may change between two repetitions.
            or job.route != replace(other.route, length=job.route.length)
        ):
            return False
        if job.payload.body == other.payload.body:
            return True
        if self._fields is None:
            self._fields = request_fields(job)
        return self._fields == request_fields(other)


def request_fields(job: InferenceJob) -> RequestFields:
    """The fields of a body that its tokens depend on: views of it, not copies."""
    fields = _fields_decoder.decode(job.payload.body)
    found = {name: raw for name, raw in fields.items() if name not in IGNORED_FIELDS}
    options = found.get("stream_options")
    if options is not None and _only_include_usage(options):
        del found["stream_options"]
    return found


def digest(job: InferenceJob) -> bytes:
    """Equal for calls that are the same, and for no others."""
    hashed = hashlib.blake2b(job.payload.api.encode(), digest_size=20)
    if job.payload.non_streaming:  # an answer in one piece cannot be streamed
        hashed.update(b"whole")
    for name, value in sorted(request_fields(job).items()):
        for part in (memoryview(name.encode()), memoryview(value)):
            hashed.update(b"%d:" % len(part))
            hashed.update(part)
    return hashed.digest()


def _only_include_usage(options: Raw) -> bool:
    """Other options change the events themselves."""
    given = msgspec.json.decode(options)
    return given is None or (isinstance(given, dict) and given.keys() <= {"include_usage"})
