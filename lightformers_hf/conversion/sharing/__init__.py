"""Several layers → one."""
