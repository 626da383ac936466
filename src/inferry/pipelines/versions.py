"""The composed models in use: those of the active settings, and others for the runs of a trial.

Belongs to the event loop. A call keeps the model that it began with, whatever is put in use meanwhile.
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from inferry.domain.run_split import RunSplit
from inferry.pipelines.composed import ComposedModel
from inferry.pipelines.model import PipelineModel


class ComposedSet(Struct, frozen=True):
    """The composed models of one version of the settings. `models` have names in the list of models; `pipelines` are
    called by their own endpoint, and some of them are models as well.
    """

    models: Mapping[str, ComposedModel] = {}
    pipelines: Mapping[str, PipelineModel] = {}


class ComposedVersions:
    """Finds the model of a name for a run."""

    def __init__(self) -> None:
        self.active = ComposedSet()
        self._candidate = self.active
        self._split: RunSplit | None = None
        self._former: tuple[ComposedSet, ...] = ()

    def use(self, active: ComposedSet, candidate: ComposedSet | None = None, split: RunSplit | None = None) -> None:
        """Serve calls that arrive with these models: those of the candidate for the runs that the split takes."""
        # A call that began with a former model may still be forwarded to another one of that version.
        self._former = (self.active, self._candidate)
        self.active, self._candidate, self._split = active, candidate or active, split

    def of(self, tenant: str, run_id: str) -> ComposedSet:
        is_tried = self._split is not None and self._split.takes(tenant, run_id)
        return self._candidate if is_tried else self.active

    def has(self, name: str, *, is_forwarded: bool) -> bool:
        """Whether any run may find a model of this name."""
        return any(name in one.models for one in self._sets(self.active, is_forwarded))

    def find(self, name: str, tenant: str, run_id: str, *, is_forwarded: bool) -> ComposedModel | None:
        """The model for the run. A call that another composed model forwards finds models of the version before too."""
        own = self.of(tenant, run_id)
        if not is_forwarded:
            return own.models.get(name)
        return next((one.models[name] for one in self._sets(own, is_forwarded) if name in one.models), None)

    def pipeline_names(self) -> set[str]:
        """Names of the pipelines that any run may call."""
        return {*self.active.pipelines, *self._candidate.pipelines}

    def _sets(self, own: ComposedSet, is_forwarded: bool) -> Iterator[ComposedSet]:
        yield own
        yield from (self.active, self._candidate)
        if is_forwarded:
            yield from self._former
