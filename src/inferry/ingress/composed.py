"""Calls of composed models: the steps run as ordinary jobs of the client's caller and run.

A call has one task. A client that disconnects cancels the task, and with it every step. Belongs to one event loop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from inferry.domain.callers import Caller
from inferry.domain.errors import GatewayError, ModelNotAllowed, ModelNotFound, NoWorker, RunCancelled
from inferry.ingress.composed_call import Call, CallContext
from inferry.ingress.composed_steps import FORWARDED_PATH, model_of, with_all_models
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request
from inferry.ingress.wire_format import ClientRequest

log = logging.getLogger(__name__)


class ComposedCalls:
    """Serves the calls of composed models."""

    def __init__(self, context: CallContext) -> None:
        self.models = context.models
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(
        self, error: GatewayError, decoded: ClientRequest | None, request: Request, reply: Reply, caller: Caller
    ) -> bool:
        """Serve a request that was refused with this error; False where its model is no composed one.

        `decoded` is None for a request that is not one chat or completions request.
        """
        name = self.name_of(error, request)
        if name is None:
            return False
        if not caller.allows_model(name):
            raise ModelNotAllowed(f"this key may not use the model `{name}`", param="model")
        self.start(self._answer, name, decoded, request, reply, caller)
        return True

    def start(
        self,
        work: Callable[[Call], Coroutine[Any, Any, None]],
        name: str,
        decoded: ClientRequest | None,
        request: Request,
        reply: Reply,
        caller: Caller,
    ) -> None:
        """Answer the request with this work, in a task that ends with the client's connection or its run."""
        call = Call(self._context, name, decoded, request, reply, with_all_models(caller))
        task = asyncio.get_running_loop().create_task(self._serve(work, call))
        reply.on_disconnect = partial(_cancel, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def name_of(self, error: GatewayError, request: Request) -> str | None:
        """The composed model of a request that was refused with this error; None where it names another model."""
        if not isinstance(error, ModelNotFound | NoWorker):
            return None
        name = model_of(request.body)
        is_known = name is not None and self.models.has(name, is_forwarded=FORWARDED_PATH in request.headers)
        return name if is_known else None

    async def _answer(self, call: Call) -> None:
        is_forwarded = FORWARDED_PATH in call.headers
        model = self.models.find(call.name, call.tenant, call.run_id, is_forwarded=is_forwarded)
        if model is None:  # only the other version of the settings has it
            raise ModelNotFound(f"unknown model `{call.name}`", param="model")
        await model.serve(call)

    async def close(self) -> None:
        """Cancel what is left and wait for it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, work: Callable[[Call], Coroutine[Any, Any, None]], call: Call) -> None:
        task = asyncio.current_task()
        assert task is not None, "it runs as a task"
        end_watch = self._context.gateway.watch_run(call.tenant, call.run_id, partial(call.cancel_with_run, task))
        try:
            await work(call)
            if not call.is_answered:
                raise RuntimeError(f"the composed model `{call.name}` gave no answer")
        except GatewayError as error:
            call.refuse(error)
        except asyncio.CancelledError:
            if call.is_run_cancelled and not call.is_answered:
                call.refuse(RunCancelled(f"the run `{call.run_id}` was cancelled"))
                return
            call.end_trace()
            if not call.is_answered:
                call.reply.abort()
            raise
        except Exception:
            log.exception("a call of the composed model %s failed", call.name)
            call.fail()
        finally:
            end_watch()


def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
