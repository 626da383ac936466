"""Clients of other libraries whose calls belong to a run. Each library is imported when its adapter is called.

The SDKs of OpenAI and Anthropic follow `x-should-retry` and `retry-after-ms` themselves.
"""

from typing import TYPE_CHECKING, Any, Literal, overload

from inferry.client.async_client import AsyncRun
from inferry.client.sync_client import Run

if TYPE_CHECKING:
    from agents import ModelProvider
    from anthropic import Anthropic, AsyncAnthropic
    from langchain_core.language_models import BaseChatModel
    from openai import AsyncOpenAI, OpenAI

NO_KEY = "unused"
"""The SDKs require a key, also for a gateway without authentication."""


@overload
def openai(run: Run, **options: Any) -> "OpenAI": ...
@overload
def openai(run: AsyncRun, **options: Any) -> "AsyncOpenAI": ...
def openai(run: Run | AsyncRun, **options: Any) -> "OpenAI | AsyncOpenAI":
    """OpenAI's client for a run, sync or async as the run is. `options` are the client's own."""
    try:
        from openai import AsyncOpenAI, OpenAI
    except ImportError as error:
        raise _missing("openai") from error
    settings: dict[str, Any] = {"base_url": f"{run.url}/v1", **_settings(run), **options}
    return OpenAI(**settings) if isinstance(run, Run) else AsyncOpenAI(**settings)


@overload
def anthropic(run: Run, **options: Any) -> "Anthropic": ...
@overload
def anthropic(run: AsyncRun, **options: Any) -> "AsyncAnthropic": ...
def anthropic(run: Run | AsyncRun, **options: Any) -> "Anthropic | AsyncAnthropic":
    """Anthropic's client for a run, sync or async as the run is. `options` are the client's own."""
    try:
        from anthropic import Anthropic, AsyncAnthropic
    except ImportError as error:
        raise _missing("anthropic") from error
    settings: dict[str, Any] = {"base_url": run.url, **_settings(run), **options}
    return Anthropic(**settings) if isinstance(run, Run) else AsyncAnthropic(**settings)


def chat_model(
    run: Run | AsyncRun, model: str, *, api: Literal["openai", "anthropic"] = "openai", **options: Any
) -> "BaseChatModel":
    """LangChain's `ChatOpenAI` or `ChatAnthropic` for a run, with sync and async methods. `options` are its own."""
    url = f"{run.url}/v1" if api == "openai" else run.url
    settings: dict[str, Any] = {"model": model, "base_url": url, **_settings(run), **options}
    try:
        if api == "anthropic":
            from langchain_anthropic import ChatAnthropic

            return ChatAnthropic(**settings)
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(**settings)
    except ImportError as error:
        raise _missing(f"langchain-{api}") from error


def agents_provider(run: Run | AsyncRun, *, use_responses: bool = False, **options: Any) -> "ModelProvider":
    """A model provider of the OpenAI Agents SDK for a run: `RunConfig(model_provider=agents_provider(run))`.

    It uses chat completions, or the Responses API with `use_responses`. `options` are those of `AsyncOpenAI`.
    """
    try:
        from agents import OpenAIProvider
        from openai import AsyncOpenAI
    except ImportError as error:
        raise _missing("openai-agents") from error
    client = AsyncOpenAI(base_url=f"{run.url}/v1", **{**_settings(run), **options})
    return OpenAIProvider(openai_client=client, use_responses=use_responses)


def _settings(run: Run | AsyncRun) -> dict[str, Any]:
    return {"api_key": run.api_key or NO_KEY, "default_headers": run.headers}


def _missing(package: str) -> ImportError:
    return ImportError(f"this adapter needs the package {package}: pip install {package}")
