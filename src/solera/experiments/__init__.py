"""Many runs: sweeps."""
