"""LoRA adapters of the embedded engine, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_EQUALITY = ("tests/engine/test_lora_equality.py",)
_DIRECTORIES = ("tests/engine/test_peft_directories.py",)
_CONTROL = ("tests/engine/test_adapter_control.py",)
_TABLE = ("tests/workers/test_adapter_table.py",)
_SEVERAL = ("tests/dispatch/test_adapters_on_workers.py",)
_GPU = ("tests/engine/gpu/test_gpu_lora.py",)
_MEMORY = ("tests/engine/test_adapter_memory.py",)

GROUP = MutantGroup(
    tests=(*_EQUALITY, *_DIRECTORIES, *_CONTROL, *_TABLE, *_SEVERAL, *_GPU, *_MEMORY),
    mutants=(
        Mutant(
            "adapters share cached prefixes",
            "engine/core.py",
            "root_key(request.salt, request.adapter)",
            "root_key(request.salt)",
            _EQUALITY,
        ),
        Mutant(
            "the chain of an adapter does not start from the salt",
            "engine/prefix_keys.py",
            "return next_key(start, [adapter]) if adapter else start",
            'return next_key(b"", [adapter]) if adapter else start',
            _CONTROL,
        ),
        Mutant(
            "rows of all adapters use the first one",
            "engine/cpu_adapters.py",
            "torch.tensor(own_rows), self._loaded[adapter])",
            "torch.tensor(own_rows), self._loaded[min(self._loaded)])",
            _EQUALITY,
        ),
        Mutant(
            "rows without an adapter use that of the others",
            "engine/cpu_adapters.py",
            "None if len(rows) == 1 else torch.tensor(own_rows)",
            "None if len(rows) <= 2 else torch.tensor(own_rows)",
            _EQUALITY,
        ),
        Mutant(
            "queries of an adapter are not scaled",
            "engine/cpu_adapters.py",
            'scale = self._model.query_scale if module == "q" and not self._model.has_qk_norm else 1.0',
            "scale = 1.0",
            _EQUALITY,
        ),
        Mutant(
            "an adapter sees inputs without the weights of their norm",
            "engine/cpu_adapters.py",
            "(pair.a if norm is None else pair.a * norm).t()",
            "pair.a.t()",
            _EQUALITY,
        ),
        Mutant(
            "the MLP's last matrix has no adapter",
            "engine/model.py",
            '            add_adapters(batch.adapters, index, "down", active, hidden)\n',
            "",
            _EQUALITY,
        ),
        Mutant(
            "the scale of rank-stabilised adapters is that of others",
            "engine/peft_config.py",
            'alpha / rank**0.5 if self.raw.get("use_rslora") else alpha / rank',
            "alpha / rank",
            _DIRECTORIES,
        ),
        Mutant(
            "biases are dropped silently",
            "engine/peft_config.py",
            'if raw.get("bias", "none") != "none":',
            "if False:",
            _DIRECTORIES,
        ),
        Mutant(
            "tensors of unknown layers are dropped silently",
            "engine/adapter_weights.py",
            "    if tensors:\n        layer, module, kind",
            "    if False:\n        layer, module, kind",
            _DIRECTORIES,
        ),
        Mutant(
            "an adapter is unloaded while sequences use it",
            "engine/adapter_control.py",
            "if not self._core.uses_adapter(adapter)]",
            "]",
            _CONTROL,
        ),
        Mutant(
            "an adapter that is being unloaded takes requests",
            "engine/adapter_control.py",
            "(request.adapter in self._loaded and request.adapter not in self._leaving)",
            "(request.adapter in self._loaded)",
            _CONTROL,
        ),
        Mutant(
            "any path may be loaded",
            "workers/in_process/adapter_table.py",
            "return directory if any(root in directory.parents for root in self._roots) else None",
            "return directory",
            _TABLE,
        ),
        Mutant(
            "links lead out of the allowed directories",
            "workers/in_process/adapter_table.py",
            "            directory = Path(path).resolve()\n",
            "            directory = Path(path).absolute()\n",
            _TABLE,
        ),
        Mutant(
            "a new process does not load the adapters",
            "workers/in_process/adapter_table.py",
            "        for adapter in self._adapters.values():\n            self._send",
            "        for adapter in ():\n            self._send",
            _TABLE,
        ),
        Mutant(
            "a name is given away while calls of the earlier adapter rest",
            "dispatch/fleet_adapters.py",
            "if any(stream.attempt.job.route.model == name for stream in self._loop.streams()):",
            "if False:",
            _SEVERAL,
        ),
        Mutant(
            "a refused adapter stays on the workers before",
            "dispatch/fleet_adapters.py",
            "            await self._unload(name, loaded)\n            raise error",
            "            raise error",
            _SEVERAL,
        ),
        Mutant(
            "a tile has rows of two adapters",
            "engine/gpu/adapter_tiles.py",
            "np.minimum(ends - starts, size)",
            "np.minimum(len(by_row) - without - starts, size)",
            _GPU,
        ),
        Mutant(
            "a slot keeps values of the adapter before",
            "engine/gpu/adapters.py",
            "    stack.a[slot].copy_(a)\n    stack.b[slot].copy_(b)\n",
            "    stack.a[slot] += a\n    stack.b[slot] += b\n",
            _GPU,
        ),
        Mutant(
            "steps without adapters run the kernels of adapters",
            "engine/gpu/graphs.py",
            "uses_adapters = packed.adapter_tiles > 0",
            "uses_adapters = self._decoder.capacity.adapters > 0",
            _GPU,
        ),
        Mutant(
            "no memory is reserved for adapters",
            "engine/memory.py",
            "adapters=config.max_adapters * self.adapter_bytes(config.max_adapter_rank)",
            "adapters=0",
            _MEMORY,
        ),
    ),
)
