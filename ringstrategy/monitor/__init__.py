"""What training costs the ranks, step by step."""
