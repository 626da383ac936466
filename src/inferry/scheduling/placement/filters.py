"""Filters: which workers a route may use. Each looks at one field of the worker's view."""

from collections.abc import Callable

from inferry.domain.routes import RouteKey
from inferry.domain.workers import WorkerView

Filter = Callable[[WorkerView, RouteKey], bool]
"""Whether the worker may take jobs of the route, up or not. Called when a worker or a route is new or has changed."""


def serves_model(view: WorkerView, route: RouteKey) -> bool:
    return route.model in view.models


def has_precision(view: WorkerView, route: RouteKey) -> bool:
    """A route that names a precision means exactly that one."""
    return route.precision is None or route.precision == view.precision


def has_adapter(view: WorkerView, route: RouteKey) -> bool:
    return route.adapter is None or route.adapter in view.adapters


def is_in_pool(view: WorkerView, route: RouteKey) -> bool:
    """Workers of a tenant pool serve that pool only, and its jobs stay there."""
    return route.isolation == view.isolation


def is_for_overflow(view: WorkerView, route: RouteKey) -> bool:
    """Workers for overflow take jobs that overflow and no others."""
    return view.overflow == route.overflow


def has_role(view: WorkerView, route: RouteKey) -> bool:
    """Workers that compute prompts alone take such jobs and no others."""
    return (view.role == "prefill") == (route.role == "prefill")
