"""What is known to every room: the error tree, metric names and their sinks, timing spans, device figures."""
