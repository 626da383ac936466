"""Two small C programs that measurements of the gateway need: a server that computes nothing, and a load generator.

`mock_llm.c` and `http_load.c` say how they are called. They are C so that, on a machine of two cores, the gateway under
test is the only thing that takes time worth mentioning.
"""

import os
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")


class Tools(Struct, frozen=True):
    """The compiled programs, and the directory they are in."""

    directory: Path

    @property
    def mock_llm(self) -> Path:
        return self.directory / "mock_llm"

    @property
    def http_load(self) -> Path:
        return self.directory / "http_load"


def build_tools(directory: Path) -> Tools:
    """Compile both programs into a directory with the C compiler that CC names (gcc)."""
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        raise SystemExit(f"this benchmark needs a C compiler and found no `{compiler}`: install gcc, or name one in CC")
    tools = Tools(directory)
    for program in (tools.mock_llm, tools.http_load):
        subprocess.run([compiler, *FLAGS, "-o", program, SOURCES / f"{program.name}.c"], check=True)
    return tools
