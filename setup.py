"""Build step that pyproject.toml cannot express: hot packages are compiled with mypyc.

`INFERRY_COMPILED=0` installs plain Python; `1` fails if compiling is impossible. By default modules are compiled if
mypyc, a C compiler and Python's headers are available. An editable install is never compiled: compiled modules would
hide later edits.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
PACKAGE = Path("src/inferry")
COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
COMPILING = {"build", "build_ext", "bdist_wheel", "install"}
"""Commands that need the extensions. pip also asks for metadata, several times, and need not wait for mypyc then."""

LINK_TIME = ["-flto=auto", "-fno-semantic-interposition", "-fno-plt"]
"""Optimised across modules when linked: 6 % less CPU time per call."""


def modules() -> list[str]:
    """The modules to compile, as named in pyproject.toml."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["inferry"]["compiled"]
    plain = {PACKAGE / path for path in named["exclude"]}
    found = {path.relative_to(ROOT) for glob in named["include"] for path in (ROOT / PACKAGE).glob(glob)}
    return sorted(str(path) for path in found - plain if path.name != "__init__.py")


def lacking() -> list[str]:
    """Missing requirements of the build."""
    needed = {
        "mypyc (pip install mypy)": find_spec("mypyc") is not None,
        f"the C compiler {COMPILER}": shutil.which(COMPILER) is not None,
        "Python.h (python3-dev)": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    return [what for what, is_there in needed.items() if not is_there]


def link_time_options(compiler: str = COMPILER) -> list[str]:
    """LINK_TIME where a trial shows that the compiler and its linker know these options, else nothing."""
    with TemporaryDirectory() as name:
        source, made = Path(name, "trial.c"), Path(name, "trial.so")
        source.write_text("int trial(void) { return 0; }\n")
        command = [compiler, "-fPIC", "-shared", *LINK_TIME, str(source), "-o", str(made)]
        tried = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    return LINK_TIME if tried.returncode == 0 else []


def extensions() -> list[Extension]:
    asked = os.environ.get("INFERRY_COMPILED", "")
    if asked == "0" or not COMPILING & set(sys.argv):
        return []
    missing = lacking()
    if missing:
        if asked == "1":
            raise SystemExit(f"Inferry cannot be compiled without {', '.join(missing)}")
        sys.stderr.write(f"Inferry stays plain Python; to be compiled it lacks {', '.join(missing)}\n")
        return []
    from mypyc.build import mypycify

    os.chdir(ROOT)
    options = ["--config-file", "pyproject.toml", *modules()]
    compiled: list[Extension] = mypycify(options, opt_level="2", debug_level="0", multi_file=True)
    link_time = link_time_options()
    for extension in compiled:
        extension.extra_compile_args = [*extension.extra_compile_args, *link_time]
        extension.extra_link_args = [*extension.extra_link_args, *link_time, "-O2"]
    return compiled + [Extension(name, [path], extra_compile_args=["-O2", "-std=c11"]) for name, path in by_hand()]


def by_hand() -> list[tuple[str, str]]:
    """The modules written in C: loops over bytes, each with a Python fallback."""
    found = sorted(path.relative_to(ROOT / "src") for path in (ROOT / PACKAGE).rglob("*.c"))
    return [(".".join(path.with_suffix("").parts), f"src/{path}") for path in found]


class EveryCore(build_ext):
    """Compiles the files of an extension in parallel; setuptools would compile them in turn."""

    def build_extensions(self) -> None:
        compile_in_turn: Callable[..., list[str]] = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as cores:
                done = cores.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in done for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": EveryCore})
