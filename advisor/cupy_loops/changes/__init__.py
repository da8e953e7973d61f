"""What makes a CuPy loop faster without an edit: one file a change, each on from the script's start. Their rows: core/transform_table.py."""
