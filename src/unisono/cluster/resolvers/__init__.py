"""Who tells a process which cluster it belongs to: one resolver for each launcher."""
