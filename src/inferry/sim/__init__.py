"""The simulator: the real scheduler in virtual time, against a calibrated model of an engine."""
