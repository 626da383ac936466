"""A pytest plugin: a property that fails has done its work here, so nobody looks for its smallest counterexample."""

from hypothesis import Phase, settings

settings.register_profile("no shrinking", phases=(Phase.explicit, Phase.generate))
settings.load_profile("no shrinking")
