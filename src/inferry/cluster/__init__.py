"""Several gateways: shared limits, ownership of worker groups, cancelled runs."""
