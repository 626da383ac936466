"""Recorded traces that some benchmarks play. They are public data and not part of the repository.

The environment variable TRACES names their directory. `inferry.sim.traces` describes the formats; times are
milliseconds.
"""

import os
from pathlib import Path

VARIABLE = "TRACES"
SOURCES = {
    "azure2023_code.csv.gz": "Azure/AzurePublicDataset, CC-BY-4.0: t_ms,input_tokens,output_tokens",
    "mooncake_conversation.jsonl.gz": "kvcache-ai/Mooncake, Apache-2.0: t_spread_ms, hash_ids of 512 tokens",
    "cc_weka_ctx32k.jsonl.gz": "callanjfox/kv-cache-tester, Apache-2.0: sessions with think_ms and hash_runs",
    "nat_agent_sessions.jsonl.gz": "ai-dynamo/dynamo benchmarks, Apache-2.0: agent sessions without times",
}
AZURE, MOONCAKE, CODING, AGENTS = SOURCES


def find_traces() -> list[Path]:
    """The trace files that are there, by name. Without any, a note says what is left out and what would be needed."""
    directory = os.environ.get(VARIABLE)
    found = [path for name in sorted(SOURCES) if directory and (path := Path(directory, name)).is_file()]
    if not found:
        print(f"no recorded traces: their rows are left out. {_needed()}", flush=True)
    return found


def find_trace(name: str) -> Path | None:
    return next((path for path in find_traces() if path.name == name), None)


def trace_file(name: str) -> Path:
    """The path of a trace file that a benchmark cannot do without."""
    path = Path(os.environ.get(VARIABLE, ""), name)
    if VARIABLE not in os.environ or not path.is_file():
        raise SystemExit(f"this benchmark plays the recorded trace {name}. {_needed()}")
    return path


def _needed() -> str:
    files = "".join(f"\n  {name}: {source}" for name, source in SOURCES.items())
    return f"Set {VARIABLE} to a directory with these files:{files}"
