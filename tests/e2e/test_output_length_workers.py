"""`lanes.<lane>.long_output_tokens` and `workers[].output_length` in the running gateway."""

from pathlib import Path

from support.several_servers import SeveralServers

WORKERS = {
    "long": {"models": ["m"], "output_length": "long"},
    "short": {"models": ["m"], "output_length": "short"},
}


def test_short_and_long_calls_use_different_workers(tmp_path: Path) -> None:
    config = {"lanes": {"P1": {"long_output_tokens": 20}}}
    with SeveralServers(tmp_path, WORKERS, config) as gateway:
        assert gateway.served_by(max_tokens=3) == {"short"}
        assert gateway.served_by(max_tokens=30) == {"long"}


def test_without_a_limit_calls_use_every_worker(tmp_path: Path) -> None:
    with SeveralServers(tmp_path, WORKERS) as gateway:
        # Calls one after another go to the first of two idle workers by name, whatever their length.
        assert gateway.served_by(max_tokens=3) == gateway.served_by(max_tokens=30)
