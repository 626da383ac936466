"""OpenTelemetry traces: context in and out, spans of a call, and their export."""
