"""Seconds of vLLM's steps, charged to the requests whose tokens the steps computed. Pure."""


class StepMeter:
    """Divides the time of steps among requests.

    The time of a step is divided evenly among its prompt tokens and new tokens. New tokens are charged on arrival. vLLM
    does not report which requests the prompt tokens of a step belong to, so a prompt is charged when its first output
    token arrives, at the average cost of the prompt tokens computed and not charged so far. The sum of the charges
    never exceeds the time of the steps. A prompt that is aborted before its first token is not charged.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step_tokens = 0
        self.step_seconds = 0.0
        self._prompt = _TokenCosts()
        self._new = _TokenCosts()

    def step(self, prompt_tokens: int, new_tokens: int, seconds: float) -> None:
        self.steps += 1
        tokens = prompt_tokens + new_tokens
        self.step_tokens, self.step_seconds = tokens, seconds
        if tokens:
            self._prompt.put(prompt_tokens, seconds * prompt_tokens / tokens)
            self._new.put(new_tokens, seconds * new_tokens / tokens)

    def charge_prompt(self, tokens: int) -> float:
        return self._prompt.take(tokens)

    def charge_new(self, tokens: int) -> float:
        return self._new.take(tokens)

    def idle(self) -> None:
        """Discard uncharged time: there is no request left to charge."""
        self._prompt, self._new = _TokenCosts(), _TokenCosts()


class _TokenCosts:
    """Computed tokens and their seconds that are not charged yet."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def put(self, tokens: int, seconds: float) -> None:
        self._tokens += tokens
        self._seconds += seconds

    def take(self, tokens: int) -> float:
        tokens = min(tokens, self._tokens)
        if not tokens:
            return 0.0
        seconds = self._seconds * tokens / self._tokens
        self._tokens -= tokens
        self._seconds -= seconds
        return seconds
