"""The prefix cache of the embedded engine, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

GROUP = MutantGroup(
    tests=(
        "tests/engine/test_prefix_cache.py",
        "tests/properties/test_block_pool_machine.py",
        "tests/engine/test_engine_planner.py",
    ),
    mutants=(
        Mutant(
            "a missing salt is the empty salt",
            "engine/prefix_keys.py",
            'b"" if salt is None else b"=" + salt.encode()',
            'b"=" + (salt or "").encode()',
        ),
        Mutant(
            "every chain starts from the same key",
            "engine/prefix_keys.py",
            'b"" if salt is None else b"=" + salt.encode()',
            'b""',
        ),
        Mutant(
            "a key does not depend on the blocks before",
            "engine/prefix_keys.py",
            'parent + array("q", tokens)',
            'array("q", tokens)',
        ),
        Mutant(
            "the last prompt token may be cached",
            "engine/sequences.py",
            "(len(self.tokens) - 1) // block_tokens",
            "len(self.tokens) // block_tokens",
        ),
        Mutant(
            "a shared block is free after its first release",
            "engine/blocks.py",
            "            if self._holders[block]:\n                continue\n",
            "",
        ),
        Mutant(
            "a claimed block stays evictable",
            "engine/blocks.py",
            "            self._cached.discard(block)\n",
            "",
        ),
        Mutant(
            "the blocks used last are evicted first",
            "engine/blocks.py",
            "self._last_use[block] = self._uses",
            "self._last_use[block] = -self._uses",
        ),
        Mutant(
            "the first block of a prefix is evicted before the others",
            "engine/blocks.py",
            "for block in reversed(blocks):",
            "for block in blocks:",
        ),
        Mutant(
            "an evicted block keeps its key",
            "engine/blocks.py",
            "del self._by_key[self._key_of.pop(block)]",
            "self._key_of.pop(block)",
        ),
        Mutant(
            "the second block with a key replaces the first",
            "engine/blocks.py",
            "            if key not in self._by_key:\n",
            "            if key:\n",
        ),
        Mutant(
            "a victim frees its shared blocks too",
            "engine/planner.py",
            "len(victim.blocks) if shared is None else shared.count_freed(victim.blocks, released)",
            "len(victim.blocks)",
        ),
        Mutant(
            "cached blocks of a prefix take nothing from the free ones",
            "engine/planner.py",
            "need -= shared.count_held(found)",
            "need -= len(found)",
        ),
        Mutant(
            "a preempted sequence reports its own blocks as cached",
            "engine/core.py",
            "        if not sequence.preemptions:\n",
            "        if sequence:\n",
        ),
        Mutant(
            "pooled sequences skip cached tokens",
            "engine/core.py",
            "None if self._shared is None or request.pooled else",
            "None if self._shared is None else",
        ),
        Mutant(
            "kept blocks are evicted first",
            "engine/blocks.py",
            "self._pop_least_recent() if self._cached else self._kept.pop_first()",
            "self._kept.pop_first() if len(self._kept) else self._pop_least_recent()",
        ),
        Mutant(
            "kept blocks have no limit",
            "engine/blocks.py",
            "        self._stop_keeping(self._kept.pop_surplus())\n",
            "",
        ),
        Mutant(
            "a block is kept until just after its time",
            "engine/kept_blocks.py",
            "if until > now:",
            "if until >= now:",
        ),
        Mutant(
            "an earlier use of a block counts",
            "engine/blocks.py",
            "if block in self._cached and use == self._last_use[block]:",
            "if block in self._cached:",
        ),
        Mutant(
            "a claimed block stays kept",
            "engine/blocks.py",
            "            self._kept.discard(block)\n",
            "",
        ),
        Mutant(
            "a tenant's quota stops its first sequence too",
            "engine/planner.py",
            "if held > 0 and held + len(sequence.tokens) > most:",
            "if held + len(sequence.tokens) > most:",
        ),
    ),
)
