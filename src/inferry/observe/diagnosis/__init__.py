"""Where latency comes from, and which one setting to change: pure rules over facts."""
