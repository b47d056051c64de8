"""Real data from this machine, a model, and the loop that `lowmem demo` and notebook 1 share."""
