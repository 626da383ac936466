"""Questions about lengths, and models that have learned from answers to them."""

from collections.abc import Iterable

from inferry.prediction.output_length import OutputLengthModel
from inferry.prediction.values import LengthQuery


def a_length_query(
    *,
    tenant: str = "a",
    model: str = "m",
    template: str | None = None,
    prompt: int = 500,
    budget: int = 8192,
    hint: int | None = None,
) -> LengthQuery:
    return LengthQuery(tenant, model, prompt, budget, template, hint)


def trained_model(query: LengthQuery, output_tokens: Iterable[int], *, truncated: bool = False) -> OutputLengthModel:
    model = OutputLengthModel()
    for tokens in output_tokens:
        model.observe(query, model.predict(query), tokens, truncated=truncated)
    return model
