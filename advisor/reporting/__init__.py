"""What people and machines read of a run: text, HTML, JSON, Markdown. Reads core only; nothing here imports torch."""
