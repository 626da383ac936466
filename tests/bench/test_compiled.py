"""The scheduler may be installed compiled: whatever is written in it, mypyc must take."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_of_scheduling_can_be_compiled(tmp_path: Path) -> None:
    statement = "import sys; from mypyc.build import mypycify; mypycify(sys.argv[2:], target_dir=sys.argv[1])"
    modules = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "src/inferry/scheduling").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    command = [sys.executable, "-c", statement, str(tmp_path), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout[-2_000:] + done.stderr[-2_000:]
    assert list(tmp_path.glob("*.c"))
