"""In the place of torch where tests/pure.py runs tests."""

raise ModuleNotFoundError("a test that needs no torch imports it: see tests/pure.py", name="torch")
