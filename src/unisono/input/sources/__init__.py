"""Where batches come from, and how an epoch over them is begun and resumed."""
