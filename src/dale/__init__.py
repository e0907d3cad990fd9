"""Robust image classifiers under a guaranteed nominal performance."""
