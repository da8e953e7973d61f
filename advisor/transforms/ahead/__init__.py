"""torch.compile's work done in a process beside: graphs are recorded in the loop, and compiled into Inductor's caches on disk."""
