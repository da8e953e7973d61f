"""What each transform would save of a step, one question a file; `predict.py` has the list."""
