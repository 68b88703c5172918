"""The Prefect server of this machine: its environment, key, database and automations.

Commands start and stop one, or use the user's own. Read `own_server.py` first. This package imports no flow.
"""
