"""Measurements of this checkout on a GPU, and what they write down. Not installed."""
