"""What an agent says about its tools when a run is over. It is shown on the run's page and used for nothing else."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from inferry.ingress.openai.decode import decode_body

MAX_TOOLS: Final = 32
MAX_NAME_CHARS: Final = 64
MAX_REPORTS: Final = 10_000
"""Runs whose report is kept."""
_MOST = 10**9

ToolName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f]*(?!\n)$")]
Calls = Annotated[int, Meta(ge=0, le=_MOST)]


class ToolUse(Struct, frozen=True):
    """Calls of one tool, `errors` among them, and their time in seconds."""

    calls: Calls
    seconds: Annotated[float, Meta(ge=0, le=_MOST)]
    errors: Calls = 0


ToolReport = Mapping[str, ToolUse]


class FinishRunBody(Struct):
    """`tools`: the tools that the run has used, by name."""

    tools: Annotated[dict[ToolName, ToolUse], Meta(max_length=MAX_TOOLS)] | None = None


_decoder: Final = msgspec.json.Decoder(FinishRunBody)


def read_report(body: bytes) -> ToolReport | None:
    """The report in the body of a request, which may be empty. Raises InvalidRequest."""
    if not body.strip():
        return None
    found: FinishRunBody = decode_body(_decoder, body)
    return found.tools


class ToolReports:
    """The latest report of each run, of the runs that reported last. In memory only."""

    def __init__(self, max_reports: int = MAX_REPORTS) -> None:
        self._max_reports = max_reports
        self._reports: OrderedDict[tuple[str, str], ToolReport] = OrderedDict()

    def of(self, tenant: str, run_id: str) -> ToolReport:
        return self._reports.get((tenant, run_id), {})

    def keep(self, tenant: str, run_id: str, report: ToolReport) -> None:
        self._reports[tenant, run_id] = report
        self._reports.move_to_end((tenant, run_id))
        if len(self._reports) > self._max_reports:
            self._reports.popitem(last=False)
