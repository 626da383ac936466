"""Pipelines, cascades, overflow and long histories, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_CASCADES = ("tests/pipelines/test_rules_and_answers.py",)
_STREAMS = ("tests/pipelines/test_composed_calls.py",)
_PLANS = ("tests/pipelines/test_pipeline_plans.py",)
_JOINT = ("tests/pipelines/test_joint_embeds.py",)
_OVERFLOW = ("tests/admission/test_overflow_budget.py",)
_RULE = ("tests/prediction/test_overflow_rule.py",)
_VALUES = ("tests/pipelines/test_stage_values.py",)

GROUP = MutantGroup(
    tests=("tests/pipelines/test_pipeline_batches.py", "tests/dispatch/test_watermark_writer.py"),
    mutants=(
        Mutant(
            "overflow in flight at a kill is forgotten",
            "dispatch/watermark_writer.py",
            "        if self._overflow is not None:\n            counted +=",
            "        if self._overflow is None:\n            counted +=",
            ("tests/dispatch/test_watermark_writer.py",),
        ),
        Mutant(
            "a stage is divided by the queue of all models",
            "pipelines/executor.py",
            "self._calls.queued_for(stage.model)",
            "self._calls.queued()",
            ("tests/pipelines/test_pipeline_batches.py",),
        ),
        Mutant(
            "an answer without log probabilities is sure",
            "pipelines/cascades.py",
            'return Verdict(False, "no_logprobs")',
            'return Verdict(True, "no_logprobs")',
            _CASCADES,
        ),
        Mutant(
            "a token is as sure as the surest one",
            "pipelines/cascades.py",
            "values is not None and min(values) < accept.min_token_logprob",
            "values is not None and max(values) < accept.min_token_logprob",
            _CASCADES,
        ),
        Mutant(
            "a deadline that has passed goes on to the large model",
            "pipelines/cascades.py",
            "isinstance(error, DeadlineExceeded | Draining)",
            "isinstance(error, Draining)",
            _CASCADES,
        ),
        Mutant(
            "a prompt that is too long for the small model is refused",
            "pipelines/cascades.py",
            "isinstance(error, ContextLengthExceeded | QueueFull | UnsupportedFeature)",
            "isinstance(error, QueueFull | UnsupportedFeature)",
            _CASCADES,
        ),
        Mutant(
            "streams of the large model are not compared",
            "pipelines/cascades.py",
            "            if not is_sampled:\n",
            "            if not is_sampled or call.streams:\n",
            _STREAMS,
        ),
        Mutant(
            "a joint call ends by the deadline of its first stage",
            "pipelines/joint_embeds.py",
            "max(deadline, self.deadline)",
            "self.deadline or deadline",
            _JOINT,
        ),
        Mutant(
            "an invalid text fails all stages of a joint call",
            "pipelines/joint_embeds.py",
            "joint.error.status == 400 and",
            "joint.error.status == 404 and",
            _JOINT,
        ),
        Mutant(
            "a stage may use all the time that is left",
            "pipelines/deadlines.py",
            "left * (duration / (duration + after) if duration > 0 else 0.5)",
            "left",
            _PLANS,
        ),
        Mutant(
            "maps do not count what is not queued yet",
            "pipelines/batch_sizes.py",
            "max(queued + 1, load.jobs + width)",
            "queued + 1",
            _PLANS,
        ),
        Mutant(
            "every map fills the next batches alone",
            "pipelines/batch_sizes.py",
            "(FULL_QUEUE - queued) // max(1, load.maps)",
            "FULL_QUEUE - queued",
            _PLANS,
        ),
        Mutant(
            "the best of many thresholds is a single look",
            "domain/proportions.py",
            "each = 1 - (1 - confidence) / CANDIDATES",
            "each = confidence",
            ("tests/domain/test_proportions.py",),
        ),
        Mutant(
            "a day's ceiling counts what is spent only",
            "admission/overflow_budget.py",
            "day.committed_nanos + nanos > day.nano_ceiling",
            "day.spent_nanos + nanos > day.nano_ceiling",
            _OVERFLOW,
        ),
        Mutant(
            "the rest of a reservation is kept",
            "admission/overflow_budget.py",
            "account.committed_nanos += cost_nanos - reservation.nanos",
            "account.committed_nanos += cost_nanos",
            _OVERFLOW,
        ),
        Mutant(
            "a call overflows to hosted workers that are too slow as well",
            "prediction/overflow_rule.py",
            "self._hosted.end(job, now) <= deadline",
            "True",
            _RULE,
        ),
        Mutant(
            "a malformed vector is a defect of the gateway",
            "pipelines/stage_calls.py",
            "    except ValueError:\n        raise WorkerLost(_MALFORMED) from None",
            "    except KeyError:\n        raise WorkerLost(_MALFORMED) from None",
            _VALUES,
        ),
        Mutant(
            "a summary ends between a tool's call and its result",
            "ingress/histories/conversation.py",
            "first_needed = min(first_needed, calls.get(index, index))",
            "first_needed = index",
            ("tests/ingress/test_history_conversation.py",),
        ),
    ),
)
