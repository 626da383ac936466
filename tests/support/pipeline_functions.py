"""Functions of pipelines in tests. `hold` waits in them until it is cancelled, `fail` raises."""

import asyncio

running: set[str] = set()


async def check(text: str) -> str:
    if "fail-work@work" in text:
        raise ValueError("a secret of the prompt")
    if "hold-work@work" in text:
        running.add(text)
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(text)
    return text.upper()


def count(texts: list[str]) -> int:
    return len(texts)
