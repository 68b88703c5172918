"""The Prefect server of this machine: the variables it is started with, its key, its database, its automations.

Commands start one and end it, or use the user's own. Read `own_server.py` first. Nothing here knows a flow of ours.
"""
