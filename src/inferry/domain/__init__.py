"""The vocabulary every other package speaks. Imports the standard library and msgspec, nothing else."""
