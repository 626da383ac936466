"""What the error of an unknown model lists."""

from typing import cast

import pytest

from inferry.dispatch.gateway import ModelCatalog
from inferry.domain.callers import Caller
from inferry.domain.errors import ModelNotFound
from inferry.domain.ports import ModelCard
from inferry.domain.tenants import Limits, Tenant
from inferry.ingress.composed_steps import with_all_models
from inferry.ingress.job_parser import MAX_LISTED_MODELS, find_card


class Catalog:
    def __init__(self, *names: str) -> None:
        self._cards = {name: ModelCard(name=name) for name in names}

    def card(self, name: str, isolation: str | None) -> ModelCard | None:
        return self._cards.get(name)

    def cards(self, isolation: str | None = None) -> dict[str, ModelCard]:
        return self._cards


def message(caller: Caller, *names: str) -> str:
    with pytest.raises(ModelNotFound) as caught:
        find_card("wrong", cast(ModelCatalog, Catalog(*names)), caller)
    return caught.value.message


@pytest.mark.plain
def test_only_a_few_models_that_the_caller_may_use_are_listed() -> None:
    names = [f"m{number}" for number in range(MAX_LISTED_MODELS + 1)]
    anyone, one = Caller(Tenant(name="a")), Caller(Tenant(name="a", limits=Limits(models=("m2",))))
    assert message(anyone, *names).endswith("; models of this gateway: `m0`, `m1`, `m2`, `m3`, `m4`, …")
    assert message(one, *names).endswith("; models of this gateway: `m2`")
    assert message(anyone) == "unknown model `wrong`"


@pytest.mark.plain
def test_a_step_of_a_composed_model_lists_none() -> None:
    caller = with_all_models(Caller(Tenant(name="a", limits=Limits(models=("composed",)))))
    assert caller.allows_model("secret")
    assert message(caller, "secret") == "unknown model `wrong`"
