"""Long histories: the older part of a conversation is replaced by a summary, and the original is kept."""
