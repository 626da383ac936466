"""A gateway before a scripted server that embeds and scores."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.http_gateway import HttpGateway
from support.pooling import pools
from support.tenant_gateway import Answer, bearer

EMBEDDINGS = "/v1/embeddings"


class PoolingGateway(HttpGateway):
    """With keys. The server also generates unless told otherwise."""

    def __init__(
        self, directory: Path, *, script: Any = pools, generates: bool = True, config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(directory, config=config)
        self.upstream.pools = script
        self.upstream.generates = generates

    def post(self, path: str, key: str, **fields: Any) -> Answer:
        return self.call("POST", path, {"model": "m", **fields}, bearer(key))

    def embed_all(self, calls: list[tuple[str, Any]]) -> list[Answer]:
        """One call per (key, input), all at once."""
        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(lambda call: self.post(EMBEDDINGS, call[0], input=call[1]), calls))
