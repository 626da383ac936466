"""The Dockerfile. `make image-steps` runs its build commands, which takes minutes."""

import json
import re

from deploy.dockerfile import ROOT, copied, is_sent, stages
from inferry.cli.config.loader import parse


def test_every_copied_path_exists_and_reaches_the_builder() -> None:
    paths = copied(stages()[0])
    assert {"pyproject.toml", "setup.py", "src"} <= set(paths)
    for path in paths:
        assert (ROOT / path).exists(), path
        assert is_sent(path.removeprefix("./")), path


def test_nothing_else_is_sent_to_the_builder() -> None:
    assert not any(is_sent(name) for name in (".git", ".venv", "tests", "build", "inferry.db", "deploy"))


def test_the_image_gets_the_installed_package_only() -> None:
    build, last = stages()
    assert build[0].rest.endswith(" AS build")
    assert copied(last) == []
    assert [one.rest for one in last if one.word == "COPY"] == ["--from=build /opt/inferry /opt/inferry"]


def test_the_wheel_is_compiled_or_not_built() -> None:
    (wheel,) = [one.rest for one in stages()[0] if one.word == "RUN" and "pip wheel" in one.rest]
    assert wheel.startswith("INFERRY_COMPILED=1 ")


def test_the_gateway_does_not_run_as_root() -> None:
    last = stages()[-1]
    (user,) = [one.rest for one in last if one.word == "USER"]
    assert int(user) > 0
    assert any(f"--uid {user} " in one.rest for one in last if one.word == "RUN")
    words = [one.word for one in last]
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_the_health_check_asks_the_port_that_is_served() -> None:
    by_word = {one.word: one.rest for one in stages()[-1]}
    arguments = json.loads(by_word["CMD"])
    port = arguments[arguments.index("--port") + 1]
    assert int(port) == parse({}).server.port
    assert f"127.0.0.1:{port}/health" in by_word["HEALTHCHECK"]
    assert port in by_word["EXPOSE"].split()


def test_base_images_are_the_official_ones() -> None:
    for stage in stages():
        assert re.match(r"python:\$\{PYTHON\}-slim-bookworm( |$)", stage[0].rest)
