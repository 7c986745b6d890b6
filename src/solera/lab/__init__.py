"""Many runs: sweeps, searches, the papers' tables."""
