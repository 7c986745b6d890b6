"""Mathematics on tensors that at least two papers use."""
