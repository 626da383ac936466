"""All mutants, by room."""

from mutants import admission, dispatch, engine, ingress, ledger, scheduling, streams, workers

GROUPS = {
    "scheduling": scheduling.GROUP,
    "admission": admission.GROUP,
    "ingress": ingress.GROUP,
    "streams": streams.GROUP,
    "dispatch": dispatch.GROUP,
    "workers": workers.GROUP,
    "ledger": ledger.GROUP,
    "engine": engine.GROUP,
}
