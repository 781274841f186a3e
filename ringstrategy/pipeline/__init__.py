"""A model over several ranks: how it is cut, scheduled and run."""
