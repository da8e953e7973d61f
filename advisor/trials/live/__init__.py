"""The search mode, in the child: driver.py tries candidates one after the other (trial.py), each against the loop as it stands."""
