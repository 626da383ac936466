"""Pauses of runs whose KV does not fit, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_FILE = "scheduling/sessions.py"
_SETS = "scheduling/working_sets.py"
_SETS_TESTS = ("tests/scheduling/test_working_sets.py",)
_MACHINE = ("tests/properties/test_sessions_machine.py",)

GROUP = MutantGroup(
    tests=(
        "tests/scheduling/test_sessions.py",
        "tests/scheduling/test_working_sets.py",
        "tests/properties/test_sessions_machine.py",
    ),
    mutants=(
        Mutant("P0 pauses", _FILE, "entry.rules.may_pause and job.attempt == 1", "job.attempt == 1"),
        Mutant("a later attempt pauses", _FILE, "entry.rules.may_pause and job.attempt == 1", "entry.rules.may_pause"),
        Mutant("a call without a run pauses", _FILE, "if job.run_id == job.job_id or entry.is_pooled:", "if False:"),
        Mutant("a pause ignores the deadline", _FILE, "min(bound_s, (job.deadline - now) / 2)", "bound_s"),
        Mutant("a pause lasts until the deadline", _FILE, "(job.deadline - now) / 2", "(job.deadline - now)"),
        Mutant(
            "a run pauses though it fits",
            _FILE,
            "(not home.paused and home.fits(tree.tokens))",
            "(not home.paused and home.fits(2 * tree.tokens))",
        ),
        Mutant(
            "a run that fits overtakes those that pause",
            _FILE,
            "(not home.paused and home.fits(tree.tokens))",
            "home.fits(tree.tokens)",
        ),
        Mutant(
            "the first run of a worker pauses if it is larger than the cache",
            _FILE,
            "and home.tokens > 0 and home.caches()",
            "and home.caches()",
        ),
        Mutant(
            "a resident run pauses",
            _FILE,
            "            home.idle.pop(tree, None)\n            return None\n",
            "            home.idle.pop(tree, None)\n",
        ),
        Mutant(
            "a run with a call is idle",
            _FILE,
            "            home.idle.pop(tree, None)\n            return None\n",
            "            return None\n",
            _MACHINE,
        ),
        Mutant(
            "no run leaves for a call whose pause has ended",
            _FILE,
            "                self._drop_surplus(home, tree.tokens)\n",
            "",
        ),
        Mutant(
            "the run that was idle last leaves first",
            _FILE,
            "            self._leave(next(iter(home.idle)))",
            "            self._leave(next(reversed(home.idle)))",
        ),
        Mutant("idle runs stay", _FILE, "if first.idle_since + keep_s > now:", "if first.idle_since <= now:"),
        Mutant(
            "nothing wakes the scheduler when an idle run may leave",
            _FILE,
            "            if home.paused and home.idle:\n",
            "            if not home.paused and home.idle:\n",
        ),
        Mutant(
            "a cancelled call stays paused",
            _FILE,
            "            if home.paused:\n                home.unpause(entry)\n",
            "            pass\n",
        ),
        Mutant(
            "paused calls do not learn that a run is over",
            _FILE,
            "            self._is_changed = True\n            self._leave(tree)",
            "            self._leave(tree)",
        ),
        Mutant(
            "a paused call goes before it fits",
            _FILE,
            "if tree.home is None and not home.fits(tree.tokens) and home.tokens > 0:",
            "if tree.home is None and not home.fits(0) and home.tokens > 0:",
        ),
        Mutant(
            "a paused run that is larger than the cache waits for an empty one in vain",
            _FILE,
            "not home.fits(tree.tokens) and home.tokens > 0:",
            "not home.fits(tree.tokens):",
        ),
        Mutant(
            "a run that leaves keeps its tokens",
            _FILE,
            "            home.count(tree, -tree.tokens)\n",
            "",
        ),
        Mutant(
            "a resident run that grows is not counted",
            _FILE,
            "        if tree.home is not None:\n            tree.home.count(tree, change)\n",
            "",
        ),
        Mutant("a run goes on with other models", _FILE, "tree.home.worker not in workers:", "tree.home is None:"),
        Mutant(
            "a run is resident where it was, not where it was sent",
            _FILE,
            "(tree.home is None or tree.home.worker is not worker)",
            "tree.home is None",
        ),
        Mutant(
            "sub-runs are runs of their own",
            _FILE,
            "if tree is None and job.parent_run is not None:",
            "if tree is None and job.parent_run == job.run_id:",
        ),
        Mutant(
            "a lost worker keeps its runs",
            _FILE,
            "            if tree.home is home:  # a tree",
            "            if tree.home is None:  # a tree",
        ),
        Mutant(
            "calls that paused for a lost worker are lost",
            _FILE,
            "        return [entry for entries in home.paused.values() for entry in entries]",
            "        return []",
        ),
        Mutant("the fullest worker is the best home", _FILE, "if free > most:", "if best is None or free < most:"),
        Mutant(
            "a run is forgotten with its calls",
            _FILE,
            "            self._departed[key] = (tokens, tree.idle_since)\n",
            "",
        ),
        Mutant(
            "tenants are served in the order of arrival",
            _SETS,
            "if best is None or (share, first.number) < (best_share, best.number):",
            "if best is None or first.number < best.number:",
        ),
        Mutant("weights of tenants do not count", _SETS, " / first.run.tenant.weight", ""),
        Mutant("a worker without a cache has pauses", _SETS, "self.misses < MAX_MISSES", "True", _SETS_TESTS),
        Mutant("misses of runs that had left count", _SETS, "elif not is_hit and was_kept:", "elif not is_hit:"),
        Mutant("hits of resident runs count", _SETS, "if is_hit and not was_kept and home.paused:", "if is_hit:"),
        Mutant("any hit is a whole one", _SETS, "2 * cached_tokens >= known_tokens", "cached_tokens > 0", _SETS_TESTS),
        Mutant(
            "the limit has no top",
            _SETS,
            "min(MAX_OVERCOMMIT, home.overcommit * RAISE_FACTOR)",
            "home.overcommit * RAISE_FACTOR",
            _SETS_TESTS,
        ),
        Mutant(
            "the limit falls below the cache",
            _SETS,
            "max(1.0, home.overcommit * LOWER_FACTOR)",
            "home.overcommit * LOWER_FACTOR",
            _SETS_TESTS,
        ),
        Mutant(
            "pauses ignore tool times", _SETS, "TOOL_TIME_FACTOR * self.tool_s <= self.refill_s()", "True", _SETS_TESTS
        ),
        Mutant(
            "idle runs are kept without bound",
            _SETS,
            "min(tool_s, self.refill_s(), MAX_KEEP_S)",
            "min(tool_s, self.refill_s())",
            _SETS_TESTS,
        ),
        Mutant(
            "idle runs are kept for longer than a refill",
            _SETS,
            "min(tool_s, self.refill_s(), MAX_KEEP_S)",
            "min(tool_s, MAX_KEEP_S)",
            _SETS_TESTS,
        ),
        Mutant("idle runs leave at once", _SETS, "max(MIN_KEEP_S, min(", "max(0.0, min(", _SETS_TESTS),
        Mutant(
            "one long tool time counts for hours",
            _SETS,
            "min(tool_s, self.refill_s(), MAX_TOOL_S)",
            "tool_s",
            _SETS_TESTS,
        ),
        Mutant(
            "the size of the cache is the KV limit",
            _SETS,
            "view.capacity.kv_tokens if view.kv_capacity is None else view.kv_capacity",
            "view.capacity.kv_tokens",
        ),
    ),
)
