"""Reads the Dockerfile, and runs the steps of its build stage without Docker: `python -m deploy.dockerfile`.

The steps run in a scratch directory that has only what the Dockerfile copies. Not run: the base image, apt-get, and the
instructions of the last stage.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
IMAGE_PATHS = ("/src", "/wheels", "/opt/inferry")


class Instruction(NamedTuple):
    word: str
    rest: str


def instructions() -> list[Instruction]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]


def stages() -> list[list[Instruction]]:
    """The instructions of each stage, with its FROM first."""
    found: list[list[Instruction]] = []
    for one in instructions():
        if one.word == "FROM":
            found.append([])
        if found:
            found[-1].append(one)
    return found


def copied(stage: list[Instruction]) -> list[str]:
    """What a stage copies from the repository."""
    copies = [one.rest.split() for one in stage if one.word == "COPY" and "--from=" not in one.rest]
    return [source for sources in copies for source in sources[:-1]]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets the builder see a file or folder at the top of the repository."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and fnmatch(path, pattern.removeprefix("!")):
            ignored = not pattern.startswith("!")
    return not ignored


def build(directory: Path) -> Path:
    """Run the steps of the build stage below a directory; returns where the image has /opt/inferry."""
    stage = stages()[0]
    places = {path: directory / path.strip("/") for path in IMAGE_PATHS}
    source = places["/src"]
    source.mkdir(parents=True)
    for name in copied(stage):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    arguments = dict(one.rest.split("=", 1) for one in stage if one.word == "ARG")
    for one in stage:
        if one.word == "RUN" and "apt-get" not in one.rest:
            command = re.sub("|".join(IMAGE_PATHS), lambda found: str(places[found[0]]), one.rest)
            print(f"+ {command}", flush=True)
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            subprocess.run(command, shell=True, check=True, cwd=source, env={**os.environ, **arguments, "PATH": path})
    return places["/opt/inferry"]


def check(installed: Path) -> None:
    """The installed command works in an empty environment, and the hot path is compiled."""
    program = installed / "bin" / "inferry"
    environment = {"PATH": "/usr/bin:/bin"}
    subprocess.run([program, "--version"], check=True, env=environment, cwd=installed)
    compiled = (
        "import inferry.scheduling.scheduler as one, psycopg, redis; assert one.__file__.endswith('.so'), one.__file__"
    )
    subprocess.run([installed / "bin" / "python", "-c", compiled], check=True, env=environment, cwd=installed)
    config = ROOT / "deploy" / "compose" / "inferry.yaml"
    secrets = {"INFERRY_LEDGER": "postgresql://h/d", "INFERRY_CLUSTER__REDIS": "redis://h", "CLUSTER_SECRET": "x" * 16}
    command = [str(program), "check-config", "--config", str(config)]
    subprocess.run(command, check=True, env={**environment, **secrets}, cwd=installed, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="inferry-image-") as scratch:
        check(build(Path(scratch)))
    print("the steps of the image's build stage work")
