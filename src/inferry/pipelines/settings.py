"""Settings of routes, cascades and ensembles, as the configuration has them."""

from typing import Literal

from msgspec import Struct

from inferry.pipelines.rules import Rule

CLASSIFY_PROMPT = "Answer with one word, the label that fits the request best: {labels}."
VERIFY_PROMPT = "Is the answer to the request correct and complete? Answer yes or no."


class ClassifierConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small model that chooses between models."""

    model: str
    """The classifier: a model that generates."""
    labels: dict[str, str]
    """Labels, and the model that gets the calls of each."""
    prompt: str = CLASSIFY_PROMPT
    """The classifier's system prompt; `{labels}` stands for the labels."""
    constrained: bool = True
    """Whether the classifier's output is constrained to the labels (`structured_outputs`). Set it to false for engines
    that cannot."""
    max_tokens: int = 8
    """Maximum output of the classifier, in tokens."""
    timeout_ms: int = 2000
    """After this time the call goes to the route's `default`."""


class RouteConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that chooses one of several models. The call then is an ordinary call of that model."""

    rules: tuple[Rule, ...] = ()
    """Rules in order; the first that applies chooses the model."""
    classify: ClassifierConfig | None = None
    """Chooses where no rule applies."""
    default: str
    """The model where nothing else chooses one."""


class VerifierConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A second opinion on an answer: a model or a Python function."""

    model: str | None = None
    """A model that is asked whether the answer is right; an answer that begins with `yes` accepts it."""
    prompt: str = VERIFY_PROMPT
    """The system prompt of the verifying model."""
    function: str | None = None
    """A function as `module:name`, sync or async, called with the request's fields and the answer's text. True
    accepts; for an ensemble it may return a number, the score of the answer."""
    timeout_ms: int = 10_000
    """After this time the answer counts as not accepted."""


class AcceptConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the small model's answer is used. All conditions that are set must hold."""

    min_mean_logprob: float | None = None
    """Smallest mean of the log probabilities of the answer's tokens."""
    min_token_logprob: float | None = None
    """Smallest log probability of any token of the answer."""
    schema: bool = True
    """Whether an answer must be what the call's `response_format` asks for."""
    verifier: VerifierConfig | None = None
    """Asked last, for answers that meet the other conditions."""

    @property
    def needs_logprobs(self) -> bool:
        return self.min_mean_logprob is not None or self.min_token_logprob is not None


class CascadeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name whose calls a small model answers, and a large one where the small one is unsure."""

    small: str
    """The model that is asked first."""
    large: str
    """The model that answers where the small one is unsure."""
    accept: AcceptConfig
    """When the small model's answer is used."""
    shadow: float = 0.02
    """Fraction of calls whose answers of both models are compared. For an accepted answer, and for a stream of the
    large model, that one is asked once more, in lane P2 and without delay for the client; that call is charged."""


class EnsembleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name whose calls several models answer at the same time; one answer is used."""

    models: tuple[str, ...]
    """The members. A model may be named several times: its answers differ if the call's temperature is above 0."""
    choose: Literal["vote", "logprob", "verifier"] = "vote"
    """`vote`: the answer that most members agree on. `logprob`: the answer with the highest mean log probability.
    `verifier`: the answer with the highest score of `verifier`, or the first that it accepts."""
    min_answers: int = 1
    """Members that must answer. With fewer the call fails with the error of the last member that failed."""
    verifier: VerifierConfig | None = None
    """For `choose: verifier`."""
