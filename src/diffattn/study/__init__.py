"""Adaptations of pretrained models: one by one, and against their controls."""
