"""The driver of a group, and what it starts on the nodes."""
