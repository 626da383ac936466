"""Steps in flight and the arrangement of a step for a GPU, broken in one place at a time. No mutant needs a GPU."""

from mutants.mutant import Mutant, MutantGroup

_OVERLAP = ("tests/engine/test_engine_overlap.py",)
_PACKING = ("tests/engine/gpu/test_gpu_buckets.py",)
_SETTINGS = ("tests/cli/test_engine_settings.py",)

GROUP = MutantGroup(
    tests=(*_OVERLAP, *_PACKING, *_SETTINGS),
    mutants=(
        Mutant(
            "a step is launched only after the one before it was collected",
            "engine/core.py",
            "self._max_in_flight = 2 if is_overlapping else 1",
            "self._max_in_flight = 1",
            _OVERLAP,
        ),
        Mutant(
            "a token computed after a stop token is delivered",
            "engine/core.py",
            "if sequence.key not in self._sequences:\n                continue",
            "if False:\n                continue",
            _OVERLAP,
        ),
        Mutant(
            "a sequence at its limit is planned once more",
            "engine/core.py",
            "if len(sequence.tokens) >= sequence.limit:\n                self._running.remove(sequence)",
            "if len(sequence.tokens) > sequence.limit:\n                self._running.remove(sequence)",
            _OVERLAP,
        ),
        Mutant(
            "a step runs in a graph that is too small",
            "engine/gpu/buckets.py",
            "bisect_left(sizes, wanted)",
            "bisect_left(sizes, wanted - 1)",
            _PACKING,
        ),
        Mutant(
            "no graph has the size of the limit",
            "engine/gpu/buckets.py",
            "[*(size for size in sizes if size < limit), limit]",
            "[size for size in sizes if size < limit] or [1]",
            _PACKING,
        ),
        Mutant(
            "a sampled token is read one place too far",
            "engine/gpu/metadata.py",
            "return token if token >= 0 else -1 - sampled_at[sequence.key]",
            "return token if token >= 0 else -2 - sampled_at[sequence.key]",
            _PACKING,
        ),
        Mutant(
            "a prompt that is not computed to its end gets a token",
            "engine/gpu/metadata.py",
            "if piece.tokens == piece.sequence.pending and not piece.sequence.is_pooled",
            "if not piece.sequence.is_pooled",
            _PACKING,
        ),
        Mutant(
            "the last tile of a chunk has no place",
            "engine/gpu/metadata.py",
            "rows // self.tile_queries + min(self.pieces, rows // 2)",
            "-(-rows // self.tile_queries)",
            _PACKING,
        ),
        Mutant(
            "a GPU gets the limits of a CPU",
            "cli/engine_settings.py",
            "replace(DEVICE_DEFAULTS[device], **configured,",
            'replace(DEVICE_DEFAULTS["cpu"], **configured,',
            _SETTINGS,
        ),
    ),
)
