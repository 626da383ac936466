"""`@inferry.batched`: a function of a list, called with single items by many callers."""
