"""Many runs: plans, search, slots, ledger. Knows nothing of tensors and imports no torch."""
