"""How a run works, without Prefect: settings, threads, what is in flight between rollouts and training, dry runs."""
