"""Types that rooms on one floor share, each defined once: a policy version, a request and its completion, the rows of a run."""
