"""Where a loader's time goes: by line and by kind of work, sampled inside one of its processes."""
