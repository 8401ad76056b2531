"""The client's HTTP to a Ray dashboard; the dispatcher has its own, ``remote/dispatch/rest.py``."""
