"""Where a job goes: filters say which workers may take it, scorers which of those is best."""
