"""Does the training step still compute what it computed: gate.py asks it of the live model, the others are its parts."""
