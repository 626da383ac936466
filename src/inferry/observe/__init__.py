"""Facts for people: metrics."""
