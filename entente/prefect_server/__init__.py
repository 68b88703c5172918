"""The Prefect server of this machine: environment, key, database, automations. Imports no flow. Read `own_server.py` first."""
