"""The profile mode, in the script's process: time steps, trace a few, and note what lines and modules do."""
