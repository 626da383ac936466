"""All mutants, by room."""

from mutants import admission, dispatch, engine, ingress, ledger, scheduling, streams, workers

ROOMS = {
    "scheduling": scheduling.ROOM,
    "admission": admission.ROOM,
    "ingress": ingress.ROOM,
    "streams": streams.ROOM,
    "dispatch": dispatch.ROOM,
    "workers": workers.ROOM,
    "ledger": ledger.ROOM,
    "engine": engine.ROOM,
}
