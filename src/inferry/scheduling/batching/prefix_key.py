"""What siblings have in common: the tenant, the template or run, and the first slice of the prompt."""

from inferry.domain.jobs import InferenceJob

PrefixKey = tuple[str, str, str]


def prefix_key(job: InferenceJob) -> PrefixKey:
    """Equal for siblings. The job has a prefix."""
    return job.tenant, job.template_id or job.run_id, job.prefix[0]
