"""Verifiers of cascades and ensembles in tests."""

import asyncio
from typing import Any


def is_long(request: dict[str, Any], answer: str) -> bool:
    assert request["messages"][0]["role"] == "user"
    return length(request, answer) > 8


async def is_long_later(request: dict[str, Any], answer: str) -> bool:
    await asyncio.sleep(0)
    return is_long(request, answer)


def length(request: dict[str, Any], answer: str) -> int:
    return len(answer)


def fails(request: dict[str, Any], answer: str) -> bool:
    raise ValueError(f"a secret: {request}")


async def never_ends(request: dict[str, Any], answer: str) -> bool:
    await asyncio.Event().wait()
    return True
