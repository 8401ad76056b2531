"""The client's half of a job: handing it over, and finding it again."""
