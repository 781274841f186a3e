"""What the tests share: ranks, scripts, small models, assertions."""
