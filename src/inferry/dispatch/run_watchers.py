"""Components that are told when a run is cancelled here: those that hold work of the run which is no job yet."""

from collections.abc import Callable, Iterable


class RunWatchers:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_run: dict[tuple[str, str], list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._by_run)

    def has(self, tenant: str, run_id: str) -> bool:
        return (tenant, run_id) in self._by_run

    def watch(self, tenant: str, run_id: str, on_cancelled: Callable[[], None]) -> Callable[[], None]:
        """Returns what ends the watch."""
        key = (tenant, run_id)
        self._by_run.setdefault(key, []).append(on_cancelled)

        def end() -> None:
            watchers = self._by_run[key]
            watchers.remove(on_cancelled)
            if not watchers:
                del self._by_run[key]

        return end

    def tell(self, tenant: str, run_ids: Iterable[str]) -> None:
        """The runs were cancelled."""
        for run_id in run_ids:
            for on_cancelled in list(self._by_run.get((tenant, run_id), ())):
                on_cancelled()
