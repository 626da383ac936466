"""All groups of mutants."""

from mutants import (
    admission,
    capacity,
    client,
    dispatch,
    engine,
    ingress,
    ledger,
    messages,
    packing,
    prompts,
    queues,
    scheduling,
    single_flight,
    streams,
    workers,
)

GROUPS = {
    "scheduling": scheduling.GROUP,
    "capacity": capacity.GROUP,
    "queues": queues.GROUP,
    "packing": packing.GROUP,
    "admission": admission.GROUP,
    "ingress": ingress.GROUP,
    "messages": messages.GROUP,
    "prompts": prompts.GROUP,
    "streams": streams.GROUP,
    "dispatch": dispatch.GROUP,
    "single_flight": single_flight.GROUP,
    "workers": workers.GROUP,
    "ledger": ledger.GROUP,
    "engine": engine.GROUP,
    "client": client.GROUP,
}
