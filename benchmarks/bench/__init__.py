"""the benchmark: named workloads, each a ratio against a reference that runs in turn with it."""
