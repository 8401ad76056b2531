"""The dispatcher: submits jobs one by one, in their order."""
