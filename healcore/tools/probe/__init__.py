"""Probes: is this curve, this optimizer state, this checkpoint healthy?"""
