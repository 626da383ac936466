"""A gateway with one scripted worker behind it, over real sockets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.scripted_worker import ScriptedWorker
from support.serving import Serving


class ScriptedGateway(Serving):
    worker: ScriptedWorker

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None, **script: Any) -> None:
        def make() -> tuple[list[ScriptedWorker], dict[str, Any]]:
            self.worker = ScriptedWorker(**script)
            return [self.worker], {}

        super().__init__(directory, make, config)
