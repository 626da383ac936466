"""The APIs whose answers are one result per input: embeddings, scores, reranking and classifications."""
