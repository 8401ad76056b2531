"""Ray in a Slurm allocation: the program that one step of the job runs on every node."""
