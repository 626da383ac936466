"""A gateway in virtual time in front of simulated engines, for situations that a test stages. `stage` is the way in."""
