"""How a run works, without Prefect: settings, threads, the queue of rollouts, dry runs. Read `play.py` first."""
