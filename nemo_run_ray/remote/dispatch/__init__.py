"""The dispatcher: hands jobs over one by one, in their order."""
