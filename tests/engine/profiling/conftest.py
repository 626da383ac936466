import os

# Before any kernel is imported: the interpreter runs kernels on the CPU.
os.environ["TRITON_INTERPRET"] = "1"
