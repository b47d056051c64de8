"""Disk Sparse Adam: the moments of a sparse embedding in a file, touched rows only."""
