"""Queues of a lane: entries, fair share and lane shares."""
