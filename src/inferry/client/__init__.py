"""A Python client of the gateway: runs with budgets and cancellation, batches, streams, and adapters for other SDKs."""

from inferry.client.adapters import agents_provider, anthropic, chat_model, openai
from inferry.client.async_client import AsyncClient, AsyncRun
from inferry.client.calls import AsyncStream
from inferry.client.completions import Completion, Piece, Prompt, Result, Usage
from inferry.client.errors import (
    AccessDenied,
    BudgetExhausted,
    CallError,
    ConnectionFailed,
    DeadlineMissed,
    InvalidCall,
    NotFound,
    Overloaded,
    RunCancelled,
    WorkerFailed,
)
from inferry.client.sync_client import Client, Run, Stream
from inferry.client.tools import ToolTime, ToolTimes

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "AsyncRun",
    "AsyncStream",
    "BudgetExhausted",
    "CallError",
    "Client",
    "Completion",
    "ConnectionFailed",
    "DeadlineMissed",
    "InvalidCall",
    "NotFound",
    "Overloaded",
    "Piece",
    "Prompt",
    "Result",
    "Run",
    "RunCancelled",
    "Stream",
    "ToolTime",
    "ToolTimes",
    "Usage",
    "WorkerFailed",
    "agents_provider",
    "anthropic",
    "chat_model",
    "openai",
]
