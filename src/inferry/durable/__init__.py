"""Work and content that outlive the process: stored documents, files, batches."""
