"""Heals the trainers of other libraries; each library is imported on first use."""
