"""Plain measuring programs, with the old way kept beside the new one as baseline."""
