"""The client's HTTP to a Ray dashboard; what runs on the cluster has ``remote/dashboard.py``."""
