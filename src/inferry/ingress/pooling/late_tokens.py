"""Tokenizes pooled jobs of an ingress process that has no tokenizer for their model."""

from inferry.dispatch.gateway import ModelCatalog
from inferry.domain.callers import Caller
from inferry.domain.jobs import Estimate, InferenceJob
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.routes import Task
from inferry.domain.values import replace
from inferry.ingress.pooling.decode import ENDPOINTS, PooledEndpoint
from inferry.ingress.pooling.parse import PooledCall, check_sizes, encode_inputs, fitting_ids, pooled_inputs

_PATHS = {"embeddings": b"/v1/embeddings", "classify": b"/v1/classify", "score": b"/v1/score"}


def tokenize_pooled(
    job: InferenceJob, card: ModelCard, models: ModelCatalog, caller: Caller, tokenizer: Tokenizer
) -> InferenceJob:
    """The job with the token ids of its inputs. Raises GatewayError."""
    endpoint = ENDPOINTS[_PATHS[job.payload.api]]
    assert isinstance(endpoint, PooledEndpoint)
    request = endpoint.decode_pooled(job.payload.body)
    uses_similarity = request.task is Task.SCORE and Task.EMBED in card.tasks
    call = PooledCall(request, {}, card, models, caller, job.arrived_at, uses_similarity)
    check_sizes(call, tokenizer.longest_token_bytes)
    ids = fitting_ids(call, encode_inputs(request, uses_similarity, tokenizer))
    return replace(
        job,
        footprint=replace(job.footprint, prompt=Estimate.exactly(sum(len(one) for one in ids))),
        payload=replace(job.payload, pooled=pooled_inputs(call, tuple(ids))),
    )
