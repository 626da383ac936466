"""The measurements behind every figure in the docs."""
