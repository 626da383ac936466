"""The authenticated caller of a request."""

from fnmatch import fnmatchcase
from typing import Final

from inferry.domain.lanes import Lane
from inferry.domain.tenants import ApiKey, Tenant
from inferry.domain.values import Value


class Caller(Value):
    """A tenant and its API key; `key` is None if authentication is off. Built once per key, read on every call.

    `max_lane`: the lower of the highest lanes of tenant and key. `pool`: the worker pool the tenant is bound to; None
    for the shared workers. `precision`: the one that its calls require; None accepts any. `may_list_models`: errors may
    name models that it may use.
    """

    def __init__(self, tenant: Tenant, key: ApiKey | None = None, may_list_models: bool = True) -> None:
        self.tenant: Final = tenant
        self.key: Final = key
        self.may_list_models: Final = may_list_models
        limits = tenant.limits
        of_key = None if key is None else key.limits
        self.max_lane: Final = limits.max_lane if of_key is None else max(limits.max_lane, of_key.max_lane)
        named = None if of_key is None else of_key.default_lane
        if named is None:
            named = limits.default_lane
        self.default_lane: Final = max(Lane.P1 if named is None else named, self.max_lane)
        self.pool: Final = tenant.name if tenant.isolation == "pool" else None
        self.precision: Final = (None if of_key is None else of_key.precision) or limits.precision
        self._allowed: Final = [
            models for models in (limits.models, None if of_key is None else of_key.models) if models is not None
        ]

    def allows_model(self, model: str) -> bool:
        """Whether both the tenant and the key allow the model."""
        return all(any(fnmatchcase(model, pattern) for pattern in models) for models in self._allowed)


ANONYMOUS: Final = Caller(Tenant(name="default"))
"""Who calls where authentication is off and no tenant is named."""
