"""Used by every room: the error tree, metric names and their sinks, timing spans, device figures."""
