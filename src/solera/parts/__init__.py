"""Parts of methods: pure functions on tensors and models. They know torch, and nothing of federations."""
