"""Parts of methods: pure functions on tensors and models. They depend on torch only, not on the federation."""
