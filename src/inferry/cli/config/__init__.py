"""One YAML file to typed settings."""
