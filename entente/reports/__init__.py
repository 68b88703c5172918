"""The report of a run: one page that holds everything, made from the run's files alone."""
