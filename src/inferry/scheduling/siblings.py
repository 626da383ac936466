"""Whether a first job waits for siblings that are about to come, before workers that batch continuously.

There is little to win: whoever comes later joins what runs, and goes where its beginning is warm. But where several
workers share the work, and the one where it is warm carries its part already, a sibling goes elsewhere and computes the
whole beginning again. Siblings that are ready together go together.

The law: a first job is held for h only where the siblings that come within h, times the prefill each of them saves by
that, are more than h times the jobs held, all in seconds. All of it is learned from what happened before to jobs of the
same template, or to runs of the same tenant where a job names no template: how many siblings came in that time, what
they had to compute again when nobody was held and when somebody was, and how long a prompt token takes. Where nothing
was ever computed twice nobody is held, nor before an idle worker.
"""

from operator import eq

from inferry.scheduling.kin import KinKey
from inferry.scheduling.tickets import Ticket

LEARNS = 0.2
"""How much the latest counts beside everything before it."""
FORGETS = 0.05
"""The same for what is computed twice: siblings of one family mostly fare alike, so it takes several to know."""
ENOUGH_SIBLINGS = 8
MARGIN = 2.0
"""How much more must be saved than is lost: all of it is an estimate, and the jobs that are held lose for certain."""
LOOKS_AGAIN = 16
"""After so many holds one family is let go, to see whether its siblings still compute anything twice."""
REMEMBERED = 1_024
HabitKey = tuple[str, str | None]


class Twice:
    """Prompt tokens that a sibling computes though they were computed before, on average."""

    __slots__ = ("_siblings", "_tokens")

    def __init__(self) -> None:
        self._siblings = 0.0
        self._tokens = 0.0

    def count(self, tokens: int) -> None:
        self._siblings += 1 - FORGETS * self._siblings
        self._tokens += tokens - FORGETS * self._tokens

    def tokens(self) -> float | None:
        """None where too few were seen to say."""
        return self._tokens / self._siblings if self._siblings >= ENOUGH_SIBLINGS else None


class Habit:
    """How families of one kind come. `alone` is what siblings computed twice when nobody was held, `together` when
    somebody was: the difference is what holding saves.
    """

    __slots__ = ("_came", "_delay", "_families", "_in_time", "alone", "holds", "s_per_token", "together")

    def __init__(self) -> None:
        self.alone = Twice()
        self.together = Twice()
        self.holds = 0
        self.s_per_token = 0.0
        self._families = 1.0  # one in vain, so that little is believed, but soon
        self._came = 0.0
        self._delay = 0.0
        self._in_time = 0.0

    def begins(self) -> None:
        self._families += 1 - LEARNS * self._families
        self._came -= LEARNS * self._came
        self._delay -= LEARNS * self._delay
        self._in_time -= LEARNS * self._in_time

    def came(self, delay: float, in_time: bool) -> None:
        """A sibling came so long after the first; say whether a hold would have been long enough for it."""
        self._came += 1
        self._delay += delay
        self._in_time += in_time

    def hold_s(self, at_most: float) -> float:
        """How long to hold to have most siblings: twice their mean delay."""
        return min(at_most, 2 * self._delay / self._came) if self._came else at_most

    def pays(self, hold_s: float) -> bool:
        """Whether holding a first job for so long saves more seconds of prefill than jobs lose by it."""
        alone, together = self.alone.tokens(), self.together.tokens()
        if not alone:
            return False
        each = alone / 2 if together is None else alone - together  # half is believed before it was tried
        siblings = self._in_time / self._families
        return each >= 1 and siblings * each * self.s_per_token > MARGIN * hold_s * (1 + siblings)

    def took(self, seconds: float, tokens: int) -> None:
        """A first job waited so long for its first token. Most had to wait for others too, so the least is believed."""
        if tokens > 0:
            each = seconds / tokens
            least = self.s_per_token
            self.s_per_token = each if not least or each < least else least + 0.1 * LEARNS * (each - least)


class Watch:
    """One family, from its first job until no more siblings are expected. `held_until` is None where nobody is held."""

    __slots__ = ("_counts_until", "_first", "_opened", "_sent_at", "_tokens", "habit", "held_until", "until")

    def __init__(self, first: Ticket, habit: Habit, now: float, counts_until: float, until: float) -> None:
        self._first = first
        self._opened = now
        self._counts_until = counts_until
        self._sent_at = now
        self._tokens = 0
        self.habit = habit
        self.until = until
        self.held_until: float | None = None

    def came(self, now: float) -> float | None:
        """A sibling has come: say until when it is held, if at all."""
        self.habit.came(now - self._opened, now < self._counts_until)
        return self.held_until if self.held_until is not None and now < self.held_until else None

    def went(self, ticket: Ticket, now: float) -> None:
        """One of the family was sent."""
        if ticket is self._first:
            self._sent_at = now
            self._tokens = ticket.prefill_tokens

    def answered(self, ticket: Ticket, now: float) -> None:
        """One of the family has its first token."""
        if ticket is self._first:
            self.habit.took(now - self._sent_at, self._tokens)

    def ended(self, ticket: Ticket) -> None:
        """One of the family is over, and charged for what it really computed where its worker has said so."""
        first, job = self._first, ticket.job
        if ticket is not first and job.arrived_at < self._counts_until:
            twice = self.habit.alone if self.held_until is None else self.habit.together
            twice.count(max(0, ticket.charged - _needed(ticket, _shared(first.job.prefix, job.prefix))))


class Watches:
    """The families of one queue that are being watched, and what was learned from those before them."""

    __slots__ = ("_habits", "_open", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._open: dict[KinKey, Watch] = {}
        self._habits: dict[HabitKey, Habit] = {}

    def came(self, ticket: Ticket, now: float) -> float | None:
        """A job with a beginning has come while every worker is busy: say until when it is held, if at all."""
        job = ticket.job
        key = (job.tenant, job.template_id or job.run_id, job.prefix[0])
        watch = self._open.get(key)
        if watch is not None and now < watch.until:
            ticket.watch = watch
            return watch.came(now)
        self._close(now)
        habit = self._habit((job.tenant, job.template_id))
        habit.begins()
        hold_s = habit.hold_s(self._window_s)
        watch = ticket.watch = self._open[key] = Watch(ticket, habit, now, now + hold_s, now + self._window_s)
        if not habit.pays(hold_s):
            return None
        habit.holds += 1
        if not habit.holds % LOOKS_AGAIN:
            return None
        watch.held_until = now + hold_s
        return watch.held_until

    def _close(self, now: float) -> None:
        """Drop watches that are over: all of one queue last equally long, so the oldest come first."""
        while self._open:
            key = next(iter(self._open))
            if now < self._open[key].until:
                return
            del self._open[key]

    def _habit(self, key: HabitKey) -> Habit:
        habit = self._habits.get(key)
        if habit is None:
            if len(self._habits) >= REMEMBERED:
                del self._habits[next(iter(self._habits))]
            habit = self._habits[key] = Habit()
        return habit


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many slices they begin with alike."""
    depth = 0
    for alike in map(eq, one, other):
        if not alike:
            break
        depth += 1
    return depth


def _needed(ticket: Ticket, shared: int) -> int:
    """The prompt tokens to compute where so many slices are warm."""
    prompt = ticket.job.footprint.prompt.expected
    return prompt - prompt * shared // len(ticket.job.prefix)
