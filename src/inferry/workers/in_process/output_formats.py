"""What the output of an engine may have besides text, and who writes it."""

from typing import NamedTuple

from inferry.domain.workers import ToolFormatName
from inferry.engine.tool_formats import ToolFormat
from inferry.workers.in_process.engine_jobs import LiveJob
from inferry.workers.in_process.logprobs_writer import LogprobEntries, LogprobsWriter, TokenTexts
from inferry.workers.in_process.tool_calls import ToolCallWriter


class OutputFormats(NamedTuple):
    """`tool_format`: how the model writes tool calls, where it may call any. `token_texts`: texts of tokens with log
    probabilities, where the engine reports these.
    """

    tool_format: ToolFormat | None = None
    token_texts: TokenTexts | None = None

    @property
    def tool_format_name(self) -> ToolFormatName | None:
        return None if self.tool_format is None else self.tool_format.name

    def set_writers(self, live: LiveJob, created: float) -> None:
        """Give a job its writers. One without tools and log probabilities has none: its output is text."""
        job, sampling = live.job, live.job.payload.sampling
        constraint = sampling.constraint
        if sampling.logprobs is not None and self.token_texts is not None:
            is_chat = job.payload.api == "chat"
            live.logprobs = LogprobEntries(self.token_texts, is_chat=is_chat, earlier_ids=live.earlier_ids)
            live.events = LogprobsWriter(job, created)
        if constraint is not None and constraint.tools and self.tool_format is not None:
            live.events = ToolCallWriter(job, constraint, self.tool_format, created)


TEXT_ONLY = OutputFormats()
