"""Seconds of vLLM's steps, charged to the requests whose tokens the steps computed. Pure."""

from inferry.domain.work_costs import SOLVE_INTERVAL_STEPS, WorkCosts


class StepMeter:
    """Divides the time of steps among requests by what the steps did for them (`domain.work_costs`).

    The time of a step is divided between its prompts and its new tokens. New tokens are charged on arrival, by the
    length of their context. vLLM does not report which requests the prompt tokens of a step belong to, so a prompt is
    charged when its first output token arrives, at the average cost of the prompt tokens computed and not charged so
    far. The sum of the charges never exceeds the time of the steps. A prompt that is aborted before its first token is
    not charged.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step_tokens = 0
        self.step_seconds = 0.0
        self.busy_seconds = 0.0
        self._costs = WorkCosts(is_exact=True)
        self._base_s = self._costs.base_s
        self._prompt = _UnchargedWork()
        self._new = _UnchargedWork()

    def step(self, prompt_tokens: int, prompts: int, new_tokens: int, kv_tokens: int, seconds: float) -> None:
        """A step that computed tokens of `prompts` prompts, and `new_tokens` with a context of `kv_tokens` in all."""
        self.steps += 1
        self.step_tokens, self.step_seconds = prompt_tokens + new_tokens, seconds
        self.busy_seconds += seconds
        if prompt_tokens or new_tokens:
            costs = self._costs
            self._base_s = costs.base_s / (prompts + new_tokens)
            prompt_s = prompts * self._base_s + costs.prompt_s * prompt_tokens
            new_s = self._new_s(new_tokens, kv_tokens)
            self._prompt.put(prompt_tokens, seconds * prompt_s / (prompt_s + new_s))
            self._new.put(new_s, seconds * new_s / (prompt_s + new_s))
            costs.add(seconds, seconds, 1, new_tokens, prompt_tokens, kv_tokens)
            if self.steps % SOLVE_INTERVAL_STEPS == 0:
                costs.solve()

    def charge_prompt(self, tokens: int) -> float:
        return self._prompt.take(tokens)

    def charge_new(self, tokens: int, context_tokens: int) -> float:
        """For new tokens of a request, each after `context_tokens` tokens."""
        return self._new.take(self._new_s(tokens, tokens * context_tokens))

    def idle(self) -> None:
        """Discard uncharged time: there is no request left to charge."""
        self._prompt, self._new = _UnchargedWork(), _UnchargedWork()

    def _new_s(self, tokens: int, kv_tokens: int) -> float:
        return tokens * (self._base_s + self._costs.token_s) + self._costs.kv_s * kv_tokens


class _UnchargedWork:
    """Work that was done and is not charged yet, and its seconds."""

    def __init__(self) -> None:
        self._work = 0.0
        self._seconds = 0.0

    def put(self, work: float, seconds: float) -> None:
        self._work += work
        self._seconds += seconds

    def take(self, work: float) -> float:
        work = min(work, self._work)
        if work <= 0:
            return 0.0
        seconds = self._seconds * work / self._work
        self._work -= work
        self._seconds -= seconds
        return seconds
