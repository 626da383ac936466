"""Failures of stages: the error of the call that failed, with the stage as `param`."""

import copy

from inferry.domain.errors import GatewayError


def at_stage(error: GatewayError, stage: str) -> GatewayError:
    """The error with the stage that failed. An inner stage of a map has named itself already."""
    if error.param is not None and error.param.startswith("stages."):
        return error
    named = copy.copy(error)
    named.message = f"stage `{stage}`: {error.message}"
    named.param = f"stages.{stage}"
    return named


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group of tasks: a GatewayError where there is one."""
    found: list[BaseException] = []
    todo: list[BaseException] = [group]
    while todo:
        one = todo.pop(0)
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions
        else:
            found.append(one)
    return next((one for one in found if isinstance(one, GatewayError)), found[0])
