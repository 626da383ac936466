"""Whether a job may enter, and what it must expect if it does. Pure: time is an argument."""
