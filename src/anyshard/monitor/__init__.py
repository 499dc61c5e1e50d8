"""Monitor: typed events and spans, and the sinks that they go to. Knows nothing of what is being done."""
