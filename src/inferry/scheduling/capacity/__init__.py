"""How much of a worker may be used: controller, step costs and prefill rate."""
