"""In the place of prefect where tests/pure.py runs tests."""

raise ModuleNotFoundError("a test that needs no prefect imports it: see tests/pure.py", name="prefect")
