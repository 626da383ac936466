"""The embedded engine on CUDA: Triton kernels, CUDA graphs, and steps that overlap with planning."""
