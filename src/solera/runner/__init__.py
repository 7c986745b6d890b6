"""Running a method: the round loop, what it measures, and what it leaves for the report."""
