"""Many elements of one task in one job: the driver, the hosts of elements, the journal."""
