"""The owner of a domain as a worker of an ingress process."""
