"""Evaluation adversaries."""
