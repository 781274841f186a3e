"""Sums of buffers over ranks: one contract, several implementations."""
