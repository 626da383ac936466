"""The lock file of the clients from npm."""

import json
import re

from support.node_clients import FOLDER


def test_versions_are_exact_and_no_registry_is_named() -> None:
    wanted = json.loads((FOLDER / "package.json").read_text())["dependencies"]
    assert all(re.fullmatch(r"[0-9.]+", version) for version in wanted.values()), wanted
    packages = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    assert packages[""]["dependencies"] == wanted
    for name, package in packages.items():
        assert "resolved" not in package, name
        assert not name or package["integrity"].startswith("sha512-"), name
