"""One stream per job: demultiplexing, text assembly, collection."""
