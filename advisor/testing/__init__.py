"""Performance under test: the pytest plugin (`plugin.py`), and what its fixtures measure and hold to budgets."""
