"""One command on one node."""
