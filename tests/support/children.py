"""Child processes import the tree that this process imports, whatever the path, the directory and the installation say.

`import_the_same_tree()` once per run puts that tree first into the environment that children inherit. A test that gives
a child an environment of its own takes it from `environment`.
"""

import os
from pathlib import Path

import inferry

TREE = Path(inferry.__file__).resolve().parents[1]
"""`src`, `build/compiled`, or wherever else the package was imported from."""
TESTS = Path(__file__).resolve().parents[1]


def environment(*last: Path, **more: str) -> dict[str, str]:
    """This process's environment with a path that leads to the same tree and to `last`, and `more` variables."""
    wanted = [
        str(TREE),
        *(str(Path(one).absolute()) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one),
        *map(str, last),
    ]
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(dict.fromkeys(wanted))}


def import_the_same_tree() -> None:
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
