"""The parts of a run that need no Prefect: settings, threads, the queue between rollouts and training, dry runs."""
