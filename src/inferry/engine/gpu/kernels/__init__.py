"""Triton kernels of a decoder step. Each file has a kernel, its launch, and a reference in torch.

Counts come from device tensors of fixed address, so that a launch captured in a CUDA graph serves steps of any size up
to its grid. Results are rounded where transformers rounds, so that outputs in bfloat16 differ in ties only.
"""
