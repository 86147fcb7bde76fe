"""Ranks that compute one model together: who holds which expert, and how tokens and weights travel between them."""
