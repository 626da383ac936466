"""What pyproject.toml cannot say: `INFERRY_COMPILED=1 pip install .` compiles the scheduler with mypyc.

The same source, the same decisions, in about a third of the time. It needs a C compiler; without the variable nothing
is compiled and nothing is needed. Not for an editable install: what was compiled would hide what is edited after it.
"""

import os
from glob import glob
from typing import Any

from setuptools import setup

SOURCES = sorted(set(glob("src/inferry/scheduling/**/*.py", recursive=True)))
compiled: dict[str, Any] = {}
if os.environ.get("INFERRY_COMPILED") == "1":
    try:
        from mypyc.build import mypycify
    except ImportError:  # asked for by pip, which installs it and comes back
        compiled = {"setup_requires": ["mypy>=1.14", "msgspec>=0.19"]}
    else:
        compiled = {"ext_modules": mypycify([path for path in SOURCES if not path.endswith("__init__.py")])}
setup(**compiled)
