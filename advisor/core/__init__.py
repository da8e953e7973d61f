"""The types that stages hand on, and units, bounds and errors. Standard library only; read these files first."""
