"""The client's half of a job: submitting it, and finding it again."""
