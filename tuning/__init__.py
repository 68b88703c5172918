"""The tuner: which engine settings draw the most decisions within constraints, measured with the adapter on and off.

Each candidate is measured in a process of its own, on requests that are handed in. Where requests come from and where results
are kept is the caller's (tasks/tuning.py): this room knows neither runs nor Prefect.
"""
