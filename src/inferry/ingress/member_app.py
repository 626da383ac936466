"""The app of a gateway that shares its workers with others. One gateway owns them, and the others pass their jobs on.

Every gateway has tenants, quotas, runs and metrics of its own, so it answers for itself. Only the owner knows the
workers: it answers what is asked about them, whichever gateway is asked.
"""

import asyncio
from collections.abc import Callable
from urllib.parse import unquote

from inferry.domain.errors import GatewayError
from inferry.ingress.admin import is_worker_path
from inferry.ingress.app import App
from inferry.ingress.forwarding import OwnerForwarding
from inferry.ingress.http.reply import Reply
from inferry.ingress.http.request import Request


class MemberApp(OwnerForwarding):
    """Forwards requests about workers, while another gateway owns them. Without an owner they get 503 `no_worker`."""

    def serve(self, request: Request, reply: Reply) -> None:
        is_local = self._open_http is None or request.target in self._posts or request.problem is not None
        if is_local or not is_worker_path(unquote(request.target.partition(b"?")[0].decode("latin-1"))):
            App.serve(self, request, reply)
            return
        try:
            self._admin.authorize(request, reply.peer)  # the owner does so too: here it says nothing to strangers
        except GatewayError as error:
            self._refuse(error, request, reply)
            return
        self._forward(request, reply)


async def no_owner(peer: str, make_protocol: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
    """What a gateway without a role forwards through."""
    raise ConnectionError("no gateway owns the workers")
