"""From the raw files of a run folder to its StepProfile, in the supervisor."""
