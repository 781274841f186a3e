"""Validation, test and prediction in which every sample counts once."""
