"""What this machine is, and what its counters and drivers say."""
