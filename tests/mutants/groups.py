"""All groups of mutants."""

from mutants import (
    admission,
    capacity,
    dispatch,
    durable,
    engine,
    ingress,
    ledger,
    messages,
    packing,
    prompts,
    queues,
    responses,
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
    "responses": responses.GROUP,
    "streams": streams.GROUP,
    "dispatch": dispatch.GROUP,
    "single_flight": single_flight.GROUP,
    "workers": workers.GROUP,
    "ledger": ledger.GROUP,
    "durable": durable.GROUP,
    "engine": engine.GROUP,
}
