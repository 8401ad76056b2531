"""The page that shows when each job waited, ran and ended."""
