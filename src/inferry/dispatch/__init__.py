"""The shell: owns time, tasks and workers, and acts on what scheduling decides."""
