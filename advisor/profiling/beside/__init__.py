"""Start the script, and sample the GPU and the host while it runs. In the supervisor."""
