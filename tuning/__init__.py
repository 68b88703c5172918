"""The tuner: which engine settings draw the most decisions within constraints, measured with the adapter on and off.

Each candidate is measured in its own process, on requests given by the caller, who also stores the results (tasks/tuning.py).
This package knows neither runs nor Prefect.
"""
