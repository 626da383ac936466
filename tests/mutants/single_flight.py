"""Single flight, broken in one place at a time: request keys, shared executions, replayed responses."""

from mutants.mutant import Mutant, MutantGroup

_FLIGHTS = (
    *("tests/dispatch/test_single_flight_bounds.py", "tests/dispatch/test_admission_control.py"),
    *("tests/dispatch/test_single_flight.py", "tests/dispatch/test_single_flight_ends.py"),
    *("tests/dispatch/test_single_flight_retries.py", "tests/properties/test_single_flight_machine.py"),
)
_REPLAYS = ("tests/dispatch/test_single_flight_bounds.py", "tests/dispatch/test_response_cache.py")

GROUP = MutantGroup(
    tests=(*_REPLAYS, *_FLIGHTS),
    mutants=(
        Mutant(
            "calls with seed 0 have no seed",
            "dispatch/singleflight/request_key.py",
            "return sampling.temperature == 0.0 or sampling.seed is not None",
            "return sampling.temperature == 0.0 or bool(sampling.seed)",
            _FLIGHTS,
        ),
        Mutant(
            "calls with seed 0 are not looked at",
            "dispatch/singleflight/single_flight.py",
            "(sampling.temperature == 0.0 or sampling.seed is not None) and",
            "(sampling.temperature == 0.0 or bool(sampling.seed)) and",
            _FLIGHTS,
        ),
        Mutant(
            "a job that resumes shares executions",
            "dispatch/singleflight/single_flight.py",
            "        if job.resume_point is not None:\n            return False\n",
            "",
            _FLIGHTS,
        ),
        Mutant(
            "a call that shares an execution at the owner is charged where it was admitted",
            "domain/attempts.py",
            "        if self.shared_with is not None:\n            return Usage(gpu_seconds=0.0)\n",
            "",
            ("tests/cluster/test_shared_executions.py",),
        ),
        Mutant(
            "fields that run together are the same",
            "dispatch/singleflight/request_key.py",
            '            hashed.update(b"%d:" % len(part))\n',
            "",
            _FLIGHTS,
        ),
        Mutant(
            "a linger of zero gets the default",
            "dispatch/singleflight/single_flight.py",
            "self._sharing.linger_s if repeat.linger_s is None else repeat.linger_s",
            "repeat.linger_s or self._sharing.linger_s",
            _FLIGHTS,
        ),
        Mutant(
            "a response capped by a budget is shared",
            "dispatch/singleflight/execution_index.py",
            "if self._shares_identical and is_deterministic(job) and executed.payload.output_cap is None:",
            "if self._shares_identical and is_deterministic(job):",
            _FLIGHTS,
        ),
        Mutant(
            "a response stopped by a budget is cached",
            "dispatch/singleflight/single_flight.py",
            "isinstance(end, Done)\n            and end.stopped is None",
            "isinstance(end, Done)",
            _FLIGHTS,
        ),
        Mutant(
            "a call that was cancelled lingers",
            "dispatch/singleflight/single_flight.py",
            "is_lingering = is_last_reader and error is None and execution.linger_s > 0",
            "is_lingering = is_last_reader and execution.linger_s > 0",
            _FLIGHTS,
        ),
        Mutant(
            "a follower that has read a part expires as if it were queued",
            "dispatch/singleflight/single_flight.py",
            "is_queued = attempt.sent_at is None and attempt.job.resume_point is None",
            "is_queued = attempt.sent_at is None",
            _FLIGHTS,
        ),
        Mutant(
            "a kept answer forgets that it was continued",
            "dispatch/singleflight/single_flight.py",
            "was_resumed = execution.source.attempt.job.resume_point is not None",
            "was_resumed = False",
            _FLIGHTS,
        ),
        Mutant(
            "a resumed execution of another job is charged",
            "dispatch/lifecycle.py",
            "attempt.usage() if attempt.shared_with is not None else total_usage(job, attempt.usage())",
            "total_usage(job, attempt.usage())",
            ("tests/dispatch/test_passed_on.py",),
        ),
        Mutant(
            "a follower waited since before it came",
            "dispatch/singleflight/execution.py",
            "None if shared_attempt.sent_at is None else max(shared_attempt.sent_at, arrived_at)",
            "shared_attempt.sent_at",
            _FLIGHTS,
        ),
        Mutant(
            "an answer is replayed at the moment it is over",
            "dispatch/singleflight/response_cache.py",
            "cached.until > now",
            "cached.until >= now",
            _REPLAYS,
        ),
        Mutant(
            "a newer answer goes with the date of the older",
            "dispatch/singleflight/response_cache.py",
            "if cached is not None and cached.until <= now:",
            "if cached is not None:",
            _REPLAYS,
        ),
        Mutant(
            "an answer that just fits is not kept",
            "dispatch/singleflight/response_cache.py",
            "if cached.size > self._limit:",
            "if cached.size >= self._limit:",
            _REPLAYS,
        ),
        Mutant(
            "answers that just fit are dropped",
            "dispatch/singleflight/response_cache.py",
            "while self.used > self._limit:",
            "while self.used >= self._limit:",
            _REPLAYS,
        ),
    ),
)
