"""The twin: the same scheduler and the same attempts in virtual time, against a calibrated model of an engine."""
