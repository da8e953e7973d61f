"""The live loop: its training, steps and times, and the words that the script's process and the supervisor exchange."""
