"""Questions about lengths, and models that have learned from answers to them."""

from collections.abc import Iterable

from inferry.admission.lengths import LengthModel
from inferry.admission.values import Question


def a_question(
    *,
    tenant: str = "a",
    model: str = "m",
    template: str | None = None,
    prompt: int = 500,
    budget: int = 8192,
    hint: int | None = None,
) -> Question:
    return Question(tenant, model, prompt, budget, template, hint)


def taught(question: Question, written: Iterable[int], *, cut: bool = False) -> LengthModel:
    model = LengthModel()
    for tokens in written:
        model.observe(question, model.predict(question), tokens, cut=cut)
    return model
