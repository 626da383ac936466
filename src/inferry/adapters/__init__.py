"""What imports somebody else's system."""
